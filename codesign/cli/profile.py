"""``codesign profile``: measure step times and acceptance on this machine."""

from __future__ import annotations

import argparse
import os
import shlex
from typing import TYPE_CHECKING, NoReturn

from codesign.cli.argument_types import from_0, non_negative, positive, share
from codesign.cli.output import add_output_arguments, emit, emit_error, progress, say
from codesign.errors import HardwareError, counted

if TYPE_CHECKING:
    from codesign.config import Deployment
    from codesign.profiler.store import ProfileSettings

_EXAMPLES = """\
examples:
  codesign profile --out profile
  codesign profile --target smollm2-135m --draft ngram --workers 2 --quick --out profile-ngram
  codesign profile --device cuda --workers 4 --out profile-gpus
  codesign profile --device cuda --deployments 1,2,1+1,3+1 --out profile-gpus
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``codesign profile`` takes."""
    parser.description = (
        "Measure how long each step of the engine takes on this machine, with all "
        "workers in one process and with each split between target and draft, and how often the "
        "draft agrees with the target on real prompts. Each split is measured several times, as a "
        "machine's pace changes. 90 seconds to 5 minutes on two cores."
    )
    parser.epilog = _EXAMPLES
    models = parser.add_argument_group("models")
    models.add_argument(
        "--target", default="smollm2-135m", metavar="MODEL", help="name or directory (smollm2-135m)"
    )
    models.add_argument(
        "--draft",
        metavar="MODEL",
        help="name or directory, or ngram, which needs no model (the target's shipped draft)",
    )
    machine = parser.add_argument_group("hardware")
    machine.add_argument(
        "--device",
        choices=("cpu", "cuda", "cpu-ranks"),
        default="cpu",
        help="cpu: workers are threads (default); cuda: they are GPUs, with a process each; "
        "cpu-ranks: the same processes on the CPU",
    )
    machine.add_argument(
        "--workers",
        type=positive,
        metavar="N",
        help="total CPU threads or GPUs (all available)",
    )
    machine.add_argument(
        "--deployments",
        metavar="LABEL,...",
        help="measure only these splits: 2 (both models on 2), 3+1 (target on 3, draft on 1); not "
        "with --device cpu",
    )
    sampling = parser.add_argument_group("sampling of the recorded text")
    sampling.add_argument("--temperature", type=from_0, default=0.0, help="0 is greedy (0)")
    sampling.add_argument(
        "--top-k", type=non_negative, default=0, help="sample from the K likeliest; 0 is all (0)"
    )
    sampling.add_argument(
        "--top-p",
        type=share,
        default=1.0,
        help="sample from tokens up to this probability mass (1)",
    )
    sampling.add_argument(
        "--seed", type=non_negative, default=0, help="seed of sampling and order (0)"
    )
    output = parser.add_argument_group("files")
    output.add_argument("--out", required=True, metavar="DIR", help="folder of the profile")
    output.add_argument(
        "--quick", action="store_true", help="fewer shapes and repetitions, 60 to 120 seconds"
    )
    output.add_argument("--resume", action="store_true", help="continue an interrupted profile")
    add_output_arguments(parser)
    parser.set_defaults(func=measure)


def measure(args: argparse.Namespace) -> None:
    """Measure and write a profile."""
    from importlib.util import find_spec
    from pathlib import Path

    if find_spec("torch") is None:
        raise HardwareError(
            "profiling runs the engine, which needs torch. Install it: pip install "
            "'codesign[engine]'"
        )
    from codesign.profiler.session import make_profile

    settings = _settings(args)
    out = Path(args.out)
    try:
        with progress(args) as report:
            about = make_profile(settings, out, resume=args.resume, progress=report)
    except (HardwareError, KeyboardInterrupt) as error:
        if args.device == "cuda":
            _leave(error, args)
        raise
    for note in about["notes"]:
        say(f"note: {note}")
    command = shlex.join(["codesign", "fit", str(out)])
    payload = {"out": out, **about, "next": command}
    text = (
        f"profiled {settings.target} with draft {settings.draft} on "
        f"{counted(settings.workers, 'worker')}: {about['num_timings']:,} timings, "
        f"{about['num_tokens']:,} recorded tokens\n"
        f"wrote {out}\nnext  {command} --out fit.json"
    )
    emit(args, payload, text)


def _leave(error: HardwareError | KeyboardInterrupt, args: argparse.Namespace) -> NoReturn:
    """End at once: a kernel that waits for a lost rank would keep this process for ever."""
    message, code = f"interrupted; {error}", 130
    if isinstance(error, HardwareError):
        message, code = str(error), error.exit_code
    say(f"codesign profile: {message}")
    if args.json:
        emit_error(args, message, code)
    os._exit(code)


def _settings(args: argparse.Namespace) -> ProfileSettings:
    from codesign.artifacts.machine import hardware
    from codesign.errors import UsageError
    from codesign.models import DRAFTS, lasting_name, resolve_model
    from codesign.policy.walk import Sampling
    from codesign.profiler.store import ProfileSettings

    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UsageError("a profile starts its own processes on this host: leave torchrun out")
    deployments = _deployments(args)
    workers = args.workers
    if workers is None:
        found = hardware()
        workers = len(found["gpus"]) if args.device == "cuda" else found["cores"]
        workers = max((d.num_workers for d in deployments), default=max(workers, 1))
    draft = args.draft
    if draft is None:
        draft = DRAFTS.get(args.target)
        if draft is None:
            resolve_model(args.target)  # a name with a slip has no draft either
            raise UsageError(
                f"no draft belongs to {args.target}. Name one, or use --draft ngram, which "
                "needs no model"
            )

    return ProfileSettings(
        target=lasting_name(args.target),
        draft=lasting_name(draft),
        workers=workers,
        sampling=Sampling(args.temperature, args.top_k, args.top_p, args.seed),
        is_quick=args.quick,
        device=args.device,
        deployments=tuple([d.label for d in deployments]),
    )


def _deployments(args: argparse.Namespace) -> list[Deployment]:
    from codesign.config import parse_deployment
    from codesign.errors import UsageError

    if args.deployments is None:
        return []
    if args.device == "cpu":
        raise UsageError("--deployments needs ranks: add --device cuda, or cpu-ranks to try it")
    if args.workers is not None:
        raise UsageError("give --workers N or --deployments LABEL,..., not both")
    found = [parse_deployment(label) for label in args.deployments.split(",")]
    for deployment in found:
        if deployment != deployment.unit:
            raise UsageError(f"{deployment.label} has replicas; profile {deployment.unit.label}")
    return list(dict.fromkeys(found))
