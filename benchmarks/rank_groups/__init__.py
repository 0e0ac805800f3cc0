"""Parts of ``bench_rank_groups``."""
