"""The engine on GPUs: rank groups, CUDA graphs, messages between leaders.

The state machines (codesign/policy), the loop (engine/serve.py), the draft's worker
(engine/draft_worker.py) and the records are the CPU engine's. What is here replaces its forwards
and its transport. The same code runs on a CPU over gloo, with plain PyTorch ops and no graphs: that
is how it is tested where there is no GPU.

    rank_engine          a plan's models on rank groups
    rank_setup, run      what all ranks know of a run, and the run
    launch, rank_process start the ranks; watch: notice when one is gone
    ranks, groups        one rank: join, load, serve or follow; tensor_group: the collectives
    rank_group           leader and followers
    group_target, group_drafter  target and draft on a group; what they run before the host asks:
                         next_steps, decode_ahead (a target), ahead_steps, run_ahead (a draft)
    link, mailbox, wire  messages between the leaders
    model_rank           one model on one rank: forward, rank_head; heads, what follows a forward;
                         growth; prompt_steps: its prompts
    graphs, buckets      steps as CUDA graphs, and which are captured
    outbox               their answers on the host, and waiting for them; quick_core: on which core
    request_rows         rows of a request; step_rows, prompt_rows, slot_messages: what the leader
                         tells the ranks of a step
    slabs, paging        where keys and values lie
    row_sampling         how each request samples
"""
