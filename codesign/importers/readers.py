"""Readers of acceptance figures that other servers and load generators publish.

Told apart by content, not by file name:

- vLLM: the text of ``/metrics`` with ``vllm:spec_decode_num_drafts``,
  ``vllm:spec_decode_num_draft_tokens`` and ``vllm:spec_decode_num_accepted_tokens_per_pos``
  (label ``position``; each name may end in ``_total``).
- SGLang: JSON of ``/server_info`` (``internal_states[].avg_spec_accept_length``); ``meta_info`` of
  responses, as JSON or JSON Lines (``spec_accept_histogram``, else ``spec_accept_length`` and
  ``spec_verify_ct``); log lines with ``accept len: 2.50``; the gauge ``sglang:spec_accept_length``.
- AIPerf: ``profile_export_aiperf.json`` (``pooled_spec_decode_acceptance_histogram``),
  ``profile_export.jsonl`` (``spec_decode_acceptance`` per request) and
  ``server_metrics_export.json`` (vLLM's counters, scraped).

Source:
    Documentation of vLLM 0.32, SGLang 0.5 and AIPerf 0.13.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from codesign.artifacts import parse_json
from codesign.errors import InputError, counted
from codesign.importers.summary import (
    AcceptanceSummary,
    from_counts,
    from_histogram,
    shorter_drafts_note,
)

_KNOWN = (
    "vLLM's /metrics; SGLang's /server_info, responses or log; AIPerf's "
    "profile_export_aiperf.json, profile_export.jsonl or server_metrics_export.json"
)
_POOLED = "pooled_spec_decode_acceptance_histogram"
_VLLM = "vllm:spec_decode_num_"
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_JSON_START = re.compile(r"\s*(\{|\[\s*\{)")  # lines of a log begin with "[2026-01-01 00:00:00]"
_LOG_LENGTH = re.compile(r"accept len:\s*([0-9.]+)")

Sample = tuple[str, Mapping[str, str], float]  # name without _total, labels, value


def read_summary(path: str | Path, *, chain: int | None = None) -> AcceptanceSummary:
    """The acceptance in a file of any known kind.

    Args:
        path: The file.
        chain: Draft tokens per round, for files that do not say.

    Raises:
        InputError: If the file cannot be read, is of no known kind, or holds no acceptance.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as err:
        raise _unknown(path) from err
    except OSError as err:
        why = f"cannot read {path}: {err.strerror or err}"
        raise InputError(f"{why}. Which files: codesign fit --help") from err
    try:
        if _JSON_START.match(text):
            return _read_json(path, text, chain)
        samples = list(_samples(text))
        if any(name.startswith(_VLLM) for name, _, _ in samples):
            return _vllm(f"vLLM counters ({path.name})", samples)
        gauges = [value for name, _, value in samples if name == "sglang:spec_accept_length"]
        lengths = [value for value in gauges if value]  # 0 before the first round
        lengths += [float(length) for length in _LOG_LENGTH.findall(text)]
        if lengths:
            return _sglang_mean(path, lengths, chain)
    except (LookupError, TypeError, ValueError, AttributeError) as err:
        raise InputError(
            f"{path} has acceptance figures in an unknown form ({err!r}). Read are {_KNOWN}"
        ) from err
    raise _unknown(path)


def _unknown(path: Path) -> InputError:
    return InputError(f"{path} has no acceptance figures of a known kind. Read are {_KNOWN}")


def _samples(text: str) -> Iterator[Sample]:
    """Samples of the Prometheus text format; other lines are passed over."""
    for name, labels, value in _SAMPLE.findall(text):
        try:
            number = float(value)
        except ValueError:
            continue
        if not math.isfinite(number):
            continue
        yield name.removesuffix("_total"), dict(_LABEL.findall(labels)), number


def _vllm(source: str, samples: Iterable[Sample]) -> AcceptanceSummary:
    """Counters of one model, summed over its engines."""
    totals: dict[str, float] = defaultdict(float)
    per_position: dict[int, float] = defaultdict(float)
    models: set[str] = set()
    for name, labels, value in samples:
        if not name.startswith(_VLLM):
            continue
        models.add(labels.get("model_name", ""))
        if name == f"{_VLLM}accepted_tokens_per_pos":
            per_position[int(labels["position"])] += value
        else:
            totals[name.removeprefix(_VLLM)] += value
    if len(models) > 1:
        raise InputError(
            f"{source}: metrics of {len(models)} models ({', '.join(sorted(models))}). Keep the "
            "lines of one"
        )
    missing = [name for name in ("drafts", "draft_tokens") if name not in totals]
    if sorted(per_position) != list(range(len(per_position))) or not per_position:
        missing.append("accepted_tokens_per_pos of every position")
    if missing:
        raise InputError(f"{source}: {', '.join(_VLLM + name for name in missing)} is missing")
    chain = len(per_position)
    notes = shorter_drafts_note(totals["draft_tokens"], totals["drafts"], chain)
    counts = [per_position[position] for position in range(chain)]
    return from_counts(source, counts, totals["drafts"], notes)


def _read_json(path: Path, text: str, chain: int | None) -> AcceptanceSummary:
    try:
        content = parse_json(text)
    except ValueError:
        content = _json_lines(path, text)
    if isinstance(content, dict):
        if _POOLED in content:
            histogram = {int(key): float(count) for key, count in content[_POOLED].items()}
            return from_histogram(f"AIPerf histogram ({path.name})", histogram, chain=chain)
        if any(name.startswith(_VLLM) for name in content.get("metrics", {})):
            source = f"vLLM counters scraped by AIPerf ({path.name})"
            return _vllm(source, _scraped(content["metrics"]))
        if "internal_states" in content or "decode" in content:
            return _sglang_server(path, content, chain)
    records = content if isinstance(content, list) else [content]
    if any("spec_decode_acceptance" in record for record in records):
        return _aiperf_records(path, records, chain)
    metas = [record["meta_info"] for record in records if "meta_info" in record]
    if metas:
        return _sglang_responses(path, metas, chain)
    raise _unknown(path)


def _json_lines(path: Path, text: str) -> list[Any]:
    records = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                records.append(parse_json(line))
            except ValueError as err:
                raise InputError(f"{path}, line {number}: not JSON ({err})") from err
    return records


def _scraped(metrics: Mapping[str, Any]) -> Iterator[Sample]:
    for name, metric in metrics.items():
        for series in metric["series"]:
            labels = series.get("labels") or {}
            yield name.removesuffix("_total"), labels, float(series["stats"].get("total", 0.0))


def _aiperf_records(path: Path, records: Iterable[Any], chain: int | None) -> AcceptanceSummary:
    found = [r["spec_decode_acceptance"] for r in records if r.get("spec_decode_acceptance")]
    if not found:
        raise InputError(f"{path}: no request has spec_decode_acceptance. Turn speculation on")
    histogram: dict[int, float] = defaultdict(float)
    for record in found:
        for accepted, count in record["acceptance_histogram"].items():
            histogram[int(accepted)] += count
    lengths = [record["num_spec_tokens"] for record in found if record.get("num_spec_tokens")]
    chain = max(lengths, default=chain)
    notes: tuple[str, ...] = ()
    if chain is not None:
        drafted = sum(record["num_draft_tokens"] for record in found)
        notes = shorter_drafts_note(drafted, sum(histogram.values()), chain)
    source = f"AIPerf records of {counted(len(found), 'request')} ({path.name})"
    return from_histogram(source, histogram, chain=chain, notes=notes)


def _sglang_server(path: Path, info: Mapping[str, Any], chain: int | None) -> AcceptanceSummary:
    if "decode" in info:  # prefill and decode apart: speculation is the decode server's
        info = info["decode"][0]
    if info.get("speculative_eagle_topk", 1) not in (None, 1):
        raise InputError(
            f"{path}: the server drafted trees (speculative_eagle_topk "
            f"{info['speculative_eagle_topk']}), and their accept length does not say how often "
            "the first choice is right. Measure with --speculative-eagle-topk 1"
        )
    lengths = [
        state.get("avg_spec_accept_length", state.get("spec_accept_length"))
        for state in info["internal_states"]
    ]
    known = [float(length) for length in lengths if length]  # 0 before the first round
    if not known:
        raise InputError(f"{path}: no avg_spec_accept_length. Turn speculation on, send requests")
    return _sglang_mean(path, known, info.get("speculative_num_steps") or chain)


def _sglang_responses(path: Path, metas: list[Any], chain: int | None) -> AcceptanceSummary:
    histogram: dict[int, float] = defaultdict(float)
    lengths, rounds = [], []
    for meta in metas:
        for accepted, count in enumerate(meta.get("spec_accept_histogram") or ()):
            histogram[accepted] += count
        if meta.get("spec_accept_length"):
            lengths.append(float(meta["spec_accept_length"]))
            rounds.append(float(meta.get("spec_verify_ct") or 1.0))
    if histogram:
        source = f"SGLang histograms of {len(metas):,} responses ({path.name})"
        return from_histogram(source, histogram, chain=chain)
    if not lengths:
        raise InputError(f"{path}: no response has spec_accept_length. Turn speculation on")
    return _sglang_mean(path, lengths, chain, weights=rounds)


def _sglang_mean(
    path: Path, lengths: list[float], chain: int | None, *, weights: list[float] | None = None
) -> AcceptanceSummary:
    if chain is None:
        raise InputError(
            f"{path} does not say how many tokens were drafted per round. Add --chain N: "
            "speculative_num_steps of the server"
        )
    weights = weights or [1.0] * len(lengths)
    pairs = zip(lengths, weights, strict=True)
    mean = math.fsum(length * weight for length, weight in pairs) / math.fsum(weights)
    note = "only the mean is known: rates per position are shaped as in the fit's own recordings"
    return AcceptanceSummary(
        f"SGLang accept length ({path.name})", chain, None, mean, None, (note,)
    )
