"""The command line as a user types it, whatever the verb."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from codesign import cli as command_line
from codesign import errors
from codesign.cli import output

ROOT = Path(__file__).parents[2]
HELP_BUDGET = 0.3  # seconds of processor time; measured: 0.04

VERBS = [name for name, _ in command_line.VERBS]

MODULES_AFTER_HELP = """\
import json, sys
from codesign.cli import main
try:
    main(sys.argv[1:])
except SystemExit as stop:
    assert stop.code == 0, stop.code
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})), file=sys.stderr)
"""


def test_help_answers_within_its_budget(cli):
    def seconds() -> float:
        """Of finished processes: what others do at the time is no part of it."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    assert cli("--help").returncode == 0  # the first one may compile
    before = seconds()
    assert cli("--help").returncode == 0
    assert seconds() - before < HELP_BUDGET


def test_help_lists_every_verb_with_what_it_does(cli):
    listed = cli("--help").stdout
    for name, help_line in command_line.VERBS:
        assert re.search(rf"^    {name} +{re.escape(help_line)}$", listed, re.MULTILINE)


def test_every_objective_of_plan_is_explained(cli):
    shown = " ".join(cli("plan", "--help").stdout.split())
    assert "fewest: as goodput, on the fewest workers that do and meet the SLO (goodput)" in shown


def test_no_words_at_all_is_help(cli):
    assert cli().stdout == cli("--help").stdout


@pytest.mark.parametrize("words", [["--help"], *([verb, "--help"] for verb in VERBS)])
def test_help_imports_nothing_heavy(words):
    answer = subprocess.run(
        [sys.executable, "-c", MODULES_AFTER_HELP, *words],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    heavy = {"numpy", "torch", "pandas", "fastparquet", "scipy", "simpy", "rich", "altair"}
    assert heavy & set(json.loads(answer.stderr)) == set()


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_its_module_and_two_examples(cli, verb):
    assert find_spec(f"codesign.cli.{verb}") is not None
    shown = cli(verb, "--help").stdout
    assert shown.count(f"\n  codesign {verb}") >= 2


def test_version_is_that_of_the_package(cli):
    assert cli("-V").stdout == cli("--version").stdout
    assert cli("--version").stdout == f"codesign {command_line.__version__}\n"


def test_unknown_verb_is_a_usage_error_in_one_line(cli):
    result = cli("fly")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("codesign fly: ")
    assert result.stderr.endswith("See: codesign --help\n")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("verb", ["env", "trace list"])
def test_unknown_flag_is_a_usage_error_in_one_line(cli, verb):
    result = cli(*verb.split(), "--jsn")
    assert result.returncode == 2
    assert (result.stdout, result.stderr) == (
        "",
        f"codesign {verb.split()[0]}: unrecognized arguments: --jsn. See: codesign {verb} --help\n",
    )


@pytest.mark.parametrize(
    "words",
    [
        "plan --trace conv-twin --seed -1",
        "simulate --trace conv-twin --seed -1",
        "trace synth steady --out twin.csv --seed -1",
        "trace show conv-twin --jitter -1",
        "profile --out profile --seed -1",
    ],
)
def test_a_seed_below_0_is_a_usage_error_in_one_line(cli, words):
    result = cli(*words.split())
    assert (result.returncode, result.stdout) == (2, "")
    assert "must be a whole number of 0 or above, not '-1'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_first_example_of_the_help_works_as_printed(cli, tmp_path):
    _, _, examples = cli("--help").stdout.partition("examples:\n")
    first = shlex.split(examples.replace("\\\n", " ").splitlines()[0])
    assert first[:2] == ["codesign", "plan"]
    result = cli(*first[1:])
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "plan.json").exists()
    assert_shown_in_readme(result.stdout)


def assert_shown_in_readme(printed: str) -> None:
    """The README has the same command: its sample must say the same, its figures to 2 %."""
    words = iter(printed.split())
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    sample = text.partition("`codesign plan` prints, shortened:")[2].split("```")[1]
    for word in sample.replace(" ...", "").split():
        near = next((w for w in words if is_near(w, word)), None)  # words between are left out
        assert near is not None, f"the README says {word}, which codesign plan does not print here"


def is_near(printed: str, shown: str) -> bool:
    printed, shown = (word.strip("[],;") for word in (printed, shown))
    if printed == shown:
        return True
    try:
        ours, theirs = (float(word.replace(",", "")) for word in (printed, shown))
    except ValueError:
        return False
    return ours == pytest.approx(theirs, rel=0.02)


def test_flags_cannot_be_abbreviated(cli):
    assert cli("env", "--js").returncode == 2


def test_json_is_the_only_thing_on_stdout(cli):
    result = cli("env", "--json")
    assert result.returncode == 0
    assert result.stderr == ""
    payload = json.loads(result.stdout)
    assert payload["codesign"] == command_line.__version__
    assert payload["hardware"]["cores"] >= 1
    assert payload["packages"]["core"]["numpy"] is not None


def test_env_names_versions_and_folders_for_people(cli):
    shown = cli("env", CODESIGN_HOME="/somewhere/models").stdout
    assert f"codesign  {command_line.__version__}\n" in shown
    assert "cache     /somewhere/models\n" in shown
    assert max(map(len, shown.splitlines())) <= 120


def test_a_reader_that_goes_away_gets_no_traceback(cli):
    assert cli("env").returncode == 0  # the same command, read to its end
    with subprocess.Popen(
        [sys.executable, "-m", "codesign", "env"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 141


def raising(error: BaseException):
    def run(args):
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.CodesignError, 1),
        (errors.UsageError, 2),
        (errors.InfeasibleError, 3),
        (errors.InputError, 4),
        (errors.HardwareError, 5),
        (errors.ValidationError, 6),
    ],
)
def test_each_error_has_its_exit_code_and_one_line(monkeypatch, capsys, error, code):
    monkeypatch.setattr("codesign.cli.env.show_env", raising(error("x is 3. Fix: codesign fit")))
    assert command_line.main(["env"]) == code
    assert capsys.readouterr() == ("", "codesign env: x is 3. Fix: codesign fit\n")


@pytest.mark.parametrize(
    ("error", "message", "code"),
    [
        (errors.InputError("a is 3.\nFix: b"), "a is 3.\\nFix: b", 4),
        (OSError(errno.ENOSPC, "No space left", "x"), "cannot use x: No space left", 4),
        (KeyboardInterrupt("kept 3 of 9"), "interrupted; kept 3 of 9", 130),
        (KeyError("two"), "bug in codesign: KeyError: 'two'. For the traceback add --debug", 1),
    ],
)
def test_with_json_an_error_is_the_one_object_on_stdout(monkeypatch, capsys, error, message, code):
    monkeypatch.setattr("codesign.cli.env.show_env", raising(error))
    assert command_line.main(["env", "--json"]) == code
    out, err = capsys.readouterr()
    assert err == f"codesign env: {message}\n"
    assert json.loads(out) == {"error": {"message": message, "exit_code": code}}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    for rank, number in (("0", 1), ("1", 0)):  # of the processes of torchrun one answers
        monkeypatch.setenv("RANK", rank)
        assert command_line.main(["env", "--json"]) == code
        assert capsys.readouterr().out.count("\n") == number


def test_with_json_flags_that_nobody_knows_are_an_object_too(capsys):
    for words in (["env", "--jsn", "--json"], ["fly", "--json"], ["trace", "--json"]):
        assert command_line.main(words) == 2
        out, err = capsys.readouterr()
        assert err == f"codesign {words[0]}: {json.loads(out)['error']['message']}\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_with_json_a_full_disk_behind_stdout_is_one_line():
    command = [sys.executable, "-m", "codesign", "env", "--json"]
    with Path("/dev/full").open("w") as full:
        answer = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert answer.returncode == 4
    assert answer.stderr == "codesign env: cannot use a file: No space left on device\n"


def test_a_profile_of_gpus_that_ends_at_once_prints_the_object_too(monkeypatch, capsys, tmp_path):
    def left(code):
        raise SystemExit(code)

    def lost(*args, **named):
        raise errors.HardwareError("lost")

    monkeypatch.setattr("codesign.profiler.session.make_profile", lost)
    monkeypatch.setattr("codesign.cli.profile._settings", lambda args: None)
    monkeypatch.setattr("os._exit", left)
    words = ["profile", "--device", "cuda", "--out", str(tmp_path / "p"), "--json"]
    with pytest.raises(SystemExit) as stop:
        command_line.main(words)
    assert stop.value.code == 5
    assert json.loads(capsys.readouterr().out) == {"error": {"message": "lost", "exit_code": 5}}


def test_an_error_after_the_result_adds_no_second_object(monkeypatch, capsys):
    def shown(args):
        output.emit(args, {"figure": 1}, "")
        raise errors.ValidationError("outside")

    monkeypatch.setattr("codesign.cli.env.show_env", shown)
    assert command_line.main(["env", "--json"]) == 6
    assert json.loads(capsys.readouterr().out) == {"figure": 1}


def test_a_bug_is_one_line_and_its_traceback_needs_debug(monkeypatch, capsys):
    monkeypatch.setattr("codesign.cli.env.show_env", raising(KeyError("two\nlines")))
    assert command_line.main(["env"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("codesign env: bug in codesign: KeyError: ")
    assert err.count("\n") == 1
    assert "--debug" in err
    assert command_line.main(["env", "--debug"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_what_the_system_refuses_is_no_bug(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path))
    for place, fix in (
        ("elsewhere", ""),
        (tmp_path / "models", ". Name another folder for the cache: CODESIGN_HOME=FOLDER"),
    ):
        refused = OSError(errno.EROFS, "Read-only file system", str(place))
        monkeypatch.setattr("codesign.cli.env.show_env", raising(refused))
        assert command_line.main(["env"]) == 4
        line = f"codesign env: cannot use {place}: Read-only file system{fix}\n"
        assert capsys.readouterr() == ("", line)


def test_a_cache_that_is_a_file_is_one_line_with_the_way_out(tmp_path, monkeypatch, capsys):
    cache = tmp_path / "cache"
    cache.write_text("")
    monkeypatch.setenv("CODESIGN_HOME", str(cache))
    assert command_line.main(["models", "fetch", "smollm2-135m"]) == 4
    assert "Not a directory. Name another folder for the cache" in capsys.readouterr().err


def test_names_that_standard_output_cannot_hold_are_escaped(cli):
    result = cli("env", CODESIGN_HOME="/models/f\u00fcr", PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    assert "cache     /models/f\\xfcr\n" in result.stdout


@pytest.mark.parametrize(
    ("stop", "line"),
    [
        (KeyboardInterrupt("kept 3 of 9 requests in runs/x"), "kept 3 of 9 requests in runs/x"),
        (KeyboardInterrupt(), "every file that was written is whole"),
    ],
)
def test_interrupt_says_what_was_kept_and_exits_130(monkeypatch, capsys, stop, line):
    monkeypatch.setattr("codesign.cli.env.show_env", raising(stop))
    assert command_line.main(["env"]) == 130
    assert capsys.readouterr().err == f"codesign env: interrupted; {line}\n"


def test_the_code_that_a_verb_returns_is_the_exit_code(monkeypatch):
    monkeypatch.setattr("codesign.cli.env.show_env", lambda args: 6)
    assert command_line.main(["env"]) == 6
