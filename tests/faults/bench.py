"""Faults drawn at random, by kind. What does not hold raises; a fault that is found becomes a named test.

Each try runs in a forked process with limits of time and memory, so that one that hangs, dies or fills the memory is seen.
"""

from __future__ import annotations

import faulthandler
import io
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import string
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from sharpscope.cli import main as command
from sharpscope.config import build_config
from sharpscope.errors import UserError
from sharpscope.integrations.completions import Options
from sharpscope.integrations.importers import import_files, recognize
from sharpscope.tasks.math import score_math
from sharpscope.traces import (
    TABLES,
    RunLock,
    TraceWriter,
    create_run_dir,
    create_run_info,
    load_run,
    load_runs,
    update_run_info,
)
from sharpscope.training import train
from sharpscope.untrusted import valid_text
from tests.faults.conftest import tables, tiny_config, tiny_policy
from tests.traces.synthetic import INFO, Shape, rows, write_run

MEMORY = 1 << 30
"""Most that a try may hold beyond what the bench holds [bytes]."""
SLOW = 600.0
"""Longest time of a try that trains [s]; a busy machine takes many times its own."""
QUICK = 120.0
"""Longest time of a try that reads [s]."""


def last_lines() -> str:
    """The end of the present exception's traceback; of what did not hold the text alone."""
    error = sys.exc_info()[1]
    if isinstance(error, NotHeldError):
        return str(error)
    return "\n".join(traceback.format_exc().splitlines()[-9:])


class NotHeldError(AssertionError):
    """A promise was broken."""


def held(condition: object, text: object) -> None:
    if not condition:
        raise NotHeldError(str(text)[:2000])


@dataclass
class Count:
    """Of a kind."""

    tried: int = 0
    held: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    most_memory: int = 0
    failed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class End:
    """How a forked process ended."""

    text: str  # what it returned, or the traceback
    status: int
    memory: int

    @property
    def killed(self) -> bool:
        return self.status == -signal.SIGKILL


def forked(work: Callable[[], Any], seconds: float, kill_after: float | None = None) -> End:
    """Run `work` in a forked process; a SIGKILL after `kill_after` seconds is wanted, one after `seconds` is not."""
    read, write = os.pipe()
    began = time.monotonic()
    process = os.fork()
    if process == 0:
        code = 0
        try:
            os.close(read)
            faulthandler.disable()
            null = os.open(os.devnull, os.O_WRONLY)
            for stream in (1, 2):
                os.dup2(null, stream)
            said = str(work())
        except BaseException:
            code, said = 1, last_lines()
        with suppress(BaseException):
            os.write(write, said.encode("utf-8", "replace")[-60_000:])
        os._exit(code)
    os.close(write)
    limit = seconds if kill_after is None else kill_after
    while True:
        ended, status, usage = os.wait4(process, os.WNOHANG)
        if ended:
            break
        if time.monotonic() - began > limit:
            os.kill(process, signal.SIGKILL)
            _, status, usage = os.wait4(process, 0)
            break
        time.sleep(0.005)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode("utf-8", "replace")
    code = os.waitstatus_to_exitcode(status)
    if kill_after is None:
        held(code != -signal.SIGKILL, f"not over after {seconds:g} s")
    return End(said, code, usage.ru_maxrss * 1024)


def one_line(call: Callable[[], Any]) -> str:
    """ "", or the message of a UserError or OSError that `call` raises; anything else is not caught."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except (UserError, OSError) as error:
            held("\n" not in str(error).strip(), f"more than a line: {error}")
            held(len(str(error)) < 2000, f"a long message: {error}")
            return str(error)
    return ""


def cli(*arguments: str) -> tuple[str, str, int]:
    """Output, errors and exit status of a command."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            command(list(arguments))
            code: Any = 0
        except SystemExit as ended:
            code = ended.code or 0
    held("unexpected" not in err.getvalue(), f"{arguments}: {err.getvalue()}")
    for text in (out.getvalue(), err.getvalue()):
        odd = {c for c in text if not c.isprintable() and c != "\n"}
        held(not odd, f"{arguments}: prints {odd}")
    return out.getvalue(), err.getvalue(), int(code)


class Bench:
    """Runs tries and counts them."""

    def __init__(self, folder: Path, seed: int, first: int) -> None:
        self.folder, self.seed, self.first = folder, seed, first
        self.count = {kind: Count() for kind in KINDS}
        torch.set_num_threads(1)

    def attempt(self, kind: str) -> None:
        count = self.count[kind]
        number = self.first + count.tried
        place = self.folder / f"{kind.replace(' ', '-')}-{number}"
        place.mkdir()
        function = KINDS[kind]
        _ = self.whole, self.sound  # made once, outside the time of a try
        began = time.monotonic()
        try:
            memory = function(self, random.Random(f"{self.seed} {kind} {number}"), place) or 0
            held(memory < self.own + MEMORY, f"held {memory / 2**20:.0f} MiB")
            count.held += 1
            count.most_memory = max(count.most_memory, memory - self.own)
        except Exception as error:
            text = str(error) if isinstance(error, NotHeldError) else last_lines()
            count.failed.append(f"{kind} {number}: {text}")
            print(f"NOT HELD: {count.failed[-1]}", flush=True)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        count.tried += 1
        took = time.monotonic() - began
        count.seconds += took
        count.slowest = max(count.slowest, took)

    @property
    def own(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    @cached_property
    def whole(self) -> tuple[Path, Path, float]:
        """A policy, an uninterrupted run of it, and the time that it took [s]."""
        policy = tiny_policy(self.folder / "policy")
        began = time.monotonic()
        end = forked(lambda: train(tiny_config(policy, self.folder / "whole")).status, SLOW)
        held(end.text == "finished", end.text)
        return policy, self.folder / "whole", time.monotonic() - began

    @cached_property
    def sound(self) -> Path:
        """A small synthetic run."""
        shape = Shape(steps=2, prompts=2, group_size=2, length=3, probe_every=1)
        return write_run(self.folder / "sound", shape=shape)

    def table(self) -> str:
        """Tried, held and failed by kind."""
        lines = [f"seed {self.seed}", f"{'kind':26} tried   held failed  slowest [s]  memory [MiB]"]
        for kind, c in self.count.items():
            numbers = f"{c.tried:5d}  {c.held:5d}  {len(c.failed):5d}  {c.slowest:11.1f}"
            lines.append(f"{kind:26} {numbers}  {c.most_memory / 2**20:12.0f}")
        total = [
            sum(x)
            for x in zip(
                *((c.tried, c.held, len(c.failed)) for c in self.count.values()), strict=True
            )
        ]
        lines.append(f"{'all':26} {total[0]:5d}  {total[1]:5d}  {total[2]:5d}")
        lines += [text for c in self.count.values() for text in c.failed]
        return "\n".join(lines) + "\n"

    # -- training

    def resumed_equals(self, run: Path, sound: bool = True) -> None:
        """Resume a run in another process and compare it with the uninterrupted one; `sound`: nothing of it was damaged."""
        policy, whole, _ = self.whole

        def go_on() -> str:
            begun = (run / "run.json").exists()
            if not begun or load_run(run).info.get("status") != "finished":
                outcome = train(tiny_config(policy, run), resume=run.exists())
                held(outcome.status == "finished", f"{outcome.status}: {outcome.reason}")
            return same(whole, run, sound)

        end = forked(go_on, SLOW)
        held(end.status == 0, end.text)

    def kill(self, rng: random.Random, place: Path) -> int:
        """`kill -9` of a training at a random time, once or twice."""
        policy, _, seconds = self.whole
        run, memory = place / "run", 0
        for attempt in range(rng.choice([1, 1, 2])):
            after = rng.uniform(0, 1.1 * seconds)
            again = attempt > 0 and run.exists()
            end = forked(
                lambda again=again: train(tiny_config(policy, run), resume=again).status,
                SLOW,
                kill_after=after,
            )
            memory = max(memory, end.memory)
            held(end.killed or end.status == 0 or "UserError" in end.text, end.text)
            if (run / "run.json").exists():
                held(not load_run(run).verify(), f"damaged parts {load_run(run).damaged}")
        self.resumed_equals(run)
        return memory

    def full_disk(self, rng: random.Random, place: Path) -> int:
        """No file may become larger than a random size (RLIMIT_FSIZE), as on a full disk."""
        policy, whole, _ = self.whole
        sizes = sorted({path.stat().st_size for path in whole.rglob("*") if path.is_file()})
        limit = max(0, rng.choice(sizes) + rng.choice([-1, 0, -100, 1000]))
        run = place / "run"

        def work() -> str:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            results = []
            results.append(one_line(lambda: results.append(train(tiny_config(policy, run)))))
            return "; ".join(
                f"{getattr(r, 'status', '')} {getattr(r, 'reason', r)}" for r in results
            )

        end = forked(work, SLOW)
        held(end.status == 0, f"limit {limit}: {end.text}")
        held("unexpected" not in end.text and "Traceback" not in end.text, end.text)
        self.resumed_equals(run)
        return end.memory

    def lost_folder(self, rng: random.Random, place: Path) -> int:
        """The run's folder, or a part of it, is removed while it trains."""
        policy, _, seconds = self.whole
        run = place / "run"
        what = rng.choice(["", "traces", "checkpoints", "run.json", "traces/tokens", "config.yaml"])
        delay = rng.uniform(0, seconds)

        def work() -> str:
            helper = os.fork()
            if helper == 0:
                until = time.monotonic() + delay
                while time.monotonic() < until or not (run / "run.json").exists():
                    time.sleep(0.002)
                    if time.monotonic() > until + 20:
                        break
                target = run / what
                if target.is_dir():
                    shutil.rmtree(target, ignore_errors=True)
                else:
                    target.unlink(missing_ok=True)
                os._exit(0)
            outcome: list[Any] = []
            said = one_line(lambda: outcome.append(train(tiny_config(policy, run))))
            os.waitpid(helper, 0)
            return f"{what or 'all'}: {said}{outcome[0].status if outcome else ''}"

        end = forked(work, SLOW)
        held(end.status == 0, f"{what} after {delay:.2f} s: {end.text}")
        if (run / "run.json").exists():
            quick = forked(lambda: one_line(lambda: load_run(run).verify()), QUICK)
            held(quick.status == 0, quick.text)
        return end.memory

    def hooks(self, rng: random.Random, place: Path) -> int:
        """An exception in a function of the recorder: the loop that it records makes the same weights."""
        from sharpscope import recording
        from tests.integrations.test_loop import equal, loop
        from tests.integrations.trainers import small_model

        places = recorder_functions(recording)
        module, owner, name = rng.choice(places)
        call = rng.randint(1, 4)
        error = rng.choice(
            [ValueError, KeyError, OSError, RuntimeError, MemoryError, ZeroDivisionError]
        )
        strict = rng.random() < 0.3

        def work() -> str:
            torch.set_num_threads(1)
            plain = loop(small_model())
            original, calls = getattr(owner, name), [0]

            def broken(*given: Any, **named: Any) -> Any:
                calls[0] += 1
                if calls[0] >= call:
                    raise error("a fault")
                return original(*given, **named)

            setattr(owner, name, broken)
            warnings.simplefilter("error" if strict else "ignore")
            try:
                recorded = loop(small_model(), place / "run", critical_sharpness=1)
            except Exception as problem:
                frames = traceback.extract_tb(problem.__traceback__)
                if any(f.name == "record" and f.filename.endswith("record.py") for f in frames):
                    return "not made"  # it says so before the training
                raise
            held(equal(plain, recorded), f"{module}.{name}: other weights")
            return "called" if calls[0] >= call else "not called"

        end = forked(work, SLOW)
        held(end.status == 0, f"{module}.{name}: {end.text}")
        return end.memory

    def two_writers(self, rng: random.Random, place: Path) -> int:
        """Two processes start a run in one folder at once: one has it, whole; the other hears so."""
        policy, _, _ = self.whole
        run, began = place / "run", time.monotonic() + 0.3
        lag = rng.choice([0.0, 0.0, 0.001, 0.01, 0.1])

        def start(index: int) -> str:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            outcome: list[Any] = []
            time.sleep(max(0.0, began + index * lag - time.monotonic()))
            said = one_line(lambda: outcome.append(train(tiny_config(policy, run))))
            return said or f"{outcome[0].status}: {outcome[0].reason}"

        ends = both(start)
        held(sum(end.startswith("finished") for end in ends) == 1, ends)
        held(not any("Traceback" in end for end in ends), ends)
        self.resumed_equals(run)
        return 0

    def two_locks(self, rng: random.Random, place: Path) -> int:
        """Two processes write rows to one run: under the lock only one does."""
        run = create_run_dir(place / "run")
        create_run_info(run, INFO)
        began = time.monotonic() + 0.05

        def write(index: int) -> str:
            time.sleep(max(0.0, began - time.monotonic()))
            try:
                with RunLock(run), TraceWriter(run) as writer:
                    for step in (1, 2, 3):
                        writer.append("steps", rows("steps", 3 * index + step, 1))
                        writer.flush()
                        time.sleep(0.02)
                return "wrote"
            except UserError as error:
                return str(error)

        ends = both(write)
        held("wrote" in ends, ends)
        held(all(end == "wrote" or "is being written" in end for end in ends), ends)
        read = load_run(run)
        held(not read.verify(), read.damaged)
        held(len(read.steps) == 3 * ends.count("wrote"), f"{len(read.steps)} rows, {ends}")
        return 0

    def damaged_checkpoint(self, rng: random.Random, place: Path) -> int:
        """Bytes of a checkpoint are flipped, cut or removed: it is named, or the resumed run is the same."""
        policy, whole, _ = self.whole
        run = place / "run"
        shutil.copytree(whole, run)
        update_run_info(run, status="interrupted")
        files = sorted(p for p in (run / "checkpoints").rglob("*") if p.is_file())
        target = rng.choice(files)
        damage_bytes(target, rng)

        def go_on() -> str:
            outcome: list[Any] = []
            config = tiny_config(policy, run)
            config = config.model_copy(update={"steps": config.steps + 1})
            said = one_line(lambda: outcome.append(train(config, resume=True)))
            return said or outcome[0].status

        end = forked(go_on, SLOW)
        held(end.status == 0, end.text)
        held(
            "damaged" in end.text or "cannot be read" in end.text or end.text == "finished",
            end.text,
        )
        return end.memory

    # -- reading

    def parts(self, rng: random.Random, place: Path) -> int:
        """Bytes of Parquet parts are flipped, cut, swapped or zeroed: what is read is right, the rest is named."""
        _, whole, _ = self.whole
        source = rng.choice([whole, self.sound])
        run = place / "run"
        shutil.copytree(source, run, ignore=shutil.ignore_patterns("checkpoints"))
        files = sorted(run.rglob("*.parquet"))
        for target in rng.sample(files, rng.randint(1, 3)):
            damage_bytes(target, rng, files)

        def work() -> str:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                broken = load_run(run)
                broken.verify()
                right = load_run(source)
                for table in TABLES:
                    if table == "reductions":
                        continue
                    all_rows = hashes(right.arrow(table).to_pandas())
                    some_rows = hashes(broken.arrow(table).to_pandas())
                    wrong = some_rows - all_rows
                    held(not wrong, f"{table}: rows that were never written: {list(wrong)[:1]}")
                    if not any(f"/{table}/" in name for name in broken.damaged):
                        held(
                            some_rows == all_rows, f"{table}: rows are missing and nothing is named"
                        )
            return cli("show", str(run))[0][:10]

        end = forked(work, QUICK)
        held(end.status == 0, end.text)
        return end.memory

    def odd_values(self, rng: random.Random, place: Path) -> int:
        """Values of the right type that no training writes, and rows that are gone, doubled or mixed."""
        _, whole, _ = self.whole
        run = place / "runs" / "run"
        source = rng.choice([whole, self.sound])
        shutil.copytree(source, run, ignore=shutil.ignore_patterns("checkpoints"))
        shutil.copytree(
            source, place / "runs" / "twin", ignore=shutil.ignore_patterns("checkpoints")
        )
        parts = [part for part in sorted(run.rglob("*.parquet")) if part.parent.name in TABLES]
        for part in rng.sample(parts, rng.randint(1, 3)):
            damage_values(part, rng)

        def work() -> str:
            cli("show", str(run))
            cli("show", str(run), "--json")
            rest: list[tuple[str, ...]] = [
                *(("tokens", str(run), *more) for more in ((), ("--spikes",), ("--by", "effect"))),
                *(("tokens", str(run), "--by", by) for by in ("component", "turn", "staleness")),
                *(("tokens", str(run), "--step", "2", "--by", by) for by in ("kl", "logp")),
                ("analyze", str(place / "runs"), "--out", str(place / "report")),
                ("analyze", str(place / "runs"), "--claims", "--out", str(place / "report")),
                ("show", str(place / "runs")),
                ("diagnose", str(run)),
                ("export", str(run), "--to", "packed", "--out", str(place / "packed")),
                ("export", str(run), "--to", "reduced", "--out", str(place / "reduced")),
            ]
            for arguments in rng.sample(rest, 3):
                cli(*arguments)
            return ""

        end = forked(work, QUICK)
        held(end.status == 0, end.text)
        return end.memory

    def run_json(self, rng: random.Random, place: Path) -> int:
        """run.json with bytes flipped, or with a value of another type anywhere."""
        run = place / "runs" / "run"
        shutil.copytree(self.sound, run)
        shutil.copytree(self.sound, place / "runs" / "good")
        file = run / "run.json"
        if rng.random() < 0.3:
            damage_bytes(file, rng)
        else:
            info = json.loads(file.read_text())
            info |= {"measuring": {"seconds": {"norms": 1.0}}, "end": "x", "forks": {"a": {}}}
            info |= {
                "imported": {"from": "x", "not_recorded": {"tokens": ["logit"]}},
                "rotation": "x",
            }
            for _ in range(rng.randint(1, 3)):
                replace_anywhere(info, rng)
            file.write_text(json.dumps(info))

        def work() -> str:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                held("good" in load_runs(place / "runs").by_name, "the other run is not shown")
            cli("show", str(run))
            cli("show", str(run), "--json")
            if rng.random() < 0.2:
                cli("analyze", str(place / "runs"), "--out", str(place / "report"))
            return ""

        end = forked(work, QUICK)
        held(end.status == 0, end.text)
        return end.memory

    def hostile_text(self, rng: random.Random, place: Path) -> int:
        """Random texts wherever a model or a file may choose them: shown, obeyed nowhere."""
        run = place / "run"
        shutil.copytree(self.sound, run)
        texts = [hostile(rng) for _ in range(6)]
        loaded = load_run(run)
        old = loaded.rollouts
        shutil.rmtree(run / "traces/rollouts")
        columns = {n: [None if pd.isna(v) else v for v in old[n]] for n in old}
        columns["reward_parts"] = [{texts[0]: 1.0}] * len(old)
        columns |= {"prompt": [texts[1]] * len(old), "completion": [texts[2]] * len(old)}
        with TraceWriter(run) as writer:
            writer.append("rollouts", columns)
            writer.append(
                "events",
                {"step": 1, "rule": texts[3], "severity": "warning", "value": 1.0, "threshold": 0.0}
                | {"action": "warn", "message": texts[4]},
            )
        update_run_info(run, name=texts[5], method=texts[0], task=texts[1], device=texts[2])

        def work() -> str:
            with chdir(place):
                before = {p for p in place.rglob("*") if "report" not in str(p)}
                for arguments in (["show", "run"], ["show", "run", "--json"], ["tokens", "run"]):
                    cli(*arguments)
                if rng.random() < 0.3:
                    cli("analyze", "run", "--out", "report")
                    page = (place / "report/report.html").read_text(encoding="utf-8")
                    held(
                        (
                            "<script>alert(" not in page
                            and "onerror=alert" not in re.sub(r"&[a-z#0-9]+;", "", page)
                        )
                        or "<img src=x" not in page,
                        "runs a script",
                    )
                    for table in (place / "report").rglob("*.csv"):
                        for cell in pd.read_csv(table, dtype=str).to_numpy().ravel():
                            held(not re.match(r"[=@]", str(cell)), f"{table.name}: {cell!r:.80}")
                held(
                    {p for p in place.rglob("*") if "report" not in str(p)} == before,
                    "wrote a file",
                )
            return ""

        end = forked(work, QUICK)
        held(end.status == 0, end.text)
        return end.memory

    def hostile_log(self, rng: random.Random, place: Path) -> int:
        """Random logs: a diagnosis or one reason."""
        name, content = random_log(rng)
        (place / name).write_bytes(content)
        end = forked(lambda: cli("diagnose", str(place / name)), QUICK)
        held(end.status == 0, f"{name} {content[:300]!r}: {end.text}")
        return end.memory

    def hostile_dump(self, rng: random.Random, place: Path) -> int:
        """Dumps of other trainers with values that no trainer writes: a run or one reason."""
        from tests.integrations.test_importers import WRITERS, small_rows

        dump = rng.choice(WRITERS)
        dump(place / "dump", small_rows())
        files = sorted(f for f in (place / "dump").rglob("*") if f.suffix in (".jsonl", ".pt"))
        target = rng.choice(files)
        lines = [] if target.suffix == ".pt" else target.read_text().splitlines()
        if not lines or rng.random() < 0.2:
            damage_bytes(target, rng)
        else:
            records = [json.loads(line) for line in lines]
            replace_anywhere(rng.choice(records), rng)
            target.write_text("".join(json.dumps(record) + "\n" for record in records))

        def work() -> str:
            def read() -> None:
                kind = recognize(place / "dump")
                import_files(kind, place / "dump", place / "out", Options("grpo"))
                load_run(place / "out").verify()
                cli("show", str(place / "out"))

            return one_line(read)

        end = forked(work, QUICK)
        held(end.status == 0, end.text)
        return end.memory

    def hostile_config(self, rng: random.Random, place: Path) -> int:
        """Random YAML as a configuration: a value or one reason."""
        file = place / "config.yaml"
        file.write_bytes(random_yaml(rng))
        end = forked(lambda: one_line(lambda: build_config(file)), QUICK)
        held(end.status == 0, f"{file.read_bytes()[:300]!r}: {end.text}")
        return end.memory

    def hostile_answer(self, rng: random.Random, place: Path) -> int:
        """Random LaTeX as an answer: scored without an error, in about a second."""

        def work() -> str:
            score_math("\\boxed{2/6}", ["1/3"])
            began = time.monotonic()
            reward = score_math(answer, ["\\frac{1}{3}"])
            took = time.monotonic() - began
            held(took < 4.0, f"{answer!r:.200} took {took:.1f} s")
            held(reward.total in (0.0, 1.0), reward)
            return ""

        answer = random_latex(rng)
        end = forked(work, QUICK)
        held(end.status == 0, f"{answer!r:.300}: {end.text}")
        return end.memory


SHARE = {"kill": 4, "full disk": 2, "exception in the recorder": 3, "damaged parts": 2}
"""Share of the time of some kinds; of the others 1."""
KINDS: dict[str, Callable[[Bench, random.Random, Path], int]] = {
    "kill": Bench.kill,
    "full disk": Bench.full_disk,
    "lost folder": Bench.lost_folder,
    "exception in the recorder": Bench.hooks,
    "two runs in one folder": Bench.two_writers,
    "two writers of a run": Bench.two_locks,
    "damaged checkpoint": Bench.damaged_checkpoint,
    "damaged parts": Bench.parts,
    "odd values": Bench.odd_values,
    "run.json": Bench.run_json,
    "hostile text": Bench.hostile_text,
    "hostile log": Bench.hostile_log,
    "hostile dump": Bench.hostile_dump,
    "hostile configuration": Bench.hostile_config,
    "hostile answer": Bench.hostile_answer,
}


# -- helpers


def same(one: Path, two: Path, sound: bool = True) -> str:
    """Compare the tables and the last weights of two runs."""
    if sound:
        held(not load_run(two).verify(), load_run(two).damaged)
    first, second = tables(one), tables(two)
    for name, frame in first.items():
        pd.testing.assert_frame_equal(frame, second[name], check_exact=True, obj=name)
    weights = [
        sorted((run / "checkpoints").glob("step-*"))[-1] / "model.safetensors" for run in (one, two)
    ]
    held(weights[0].read_bytes() == weights[1].read_bytes(), "other weights")
    return "same"


def both(work: Callable[[int], str]) -> list[str]:
    """What two processes return that do the same at once."""
    pipes = []
    for index in range(2):
        read, write = os.pipe()
        process = os.fork()
        if process == 0:
            try:
                said = work(index)
            except BaseException:
                said = last_lines()
            os.write(write, said.encode()[-60_000:])
            os._exit(0)
        os.close(write)
        pipes.append((process, read))
    ends = []
    for process, read in pipes:
        with os.fdopen(read, "rb") as pipe:
            ends.append(pipe.read().decode())
        os.waitpid(process, 0)
    return ends


def recorder_functions(package: Any) -> list[tuple[str, Any, str]]:
    """(module, owner, name) of the functions and methods of the recorder's modules."""
    import importlib
    import pkgutil

    found = []
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if getattr(value, "__module__", "") != info.name:
                continue
            if isinstance(value, type):
                methods = [
                    (value, n) for n, f in vars(value).items() if callable(f) and n[:2] != "__"
                ]
                found += [
                    (f"{info.name}.{name}", *method)
                    for method in methods
                    if not isinstance(vars(value)[method[1]], staticmethod | classmethod)
                ]
            elif callable(value):
                found.append((info.name, module, name))
    guards = (
        "give_up",
        "in_step",
        "together",
        "safely",
        "_after_step",  # counts, and calls what `together` guards
        "say",
        "NoWriter",
    )  # what catches exceptions
    return [f for f in found if f[2] not in guards and not f[0].endswith("guard")]


def damage_bytes(target: Path, rng: random.Random, others: list[Path] | None = None) -> None:
    """Flip, cut, zero, extend or replace the content of a file."""
    content = bytearray(target.read_bytes())
    how = rng.choice(["flip", "flip", "flip", "cut", "zero", "extend", "swap", "empty", "gone"])
    if how == "flip" and content:
        for _ in range(rng.randint(1, 5)):
            near_end = rng.random() < 0.5
            at = rng.randrange(max(0, len(content) - 3000) if near_end else 0, len(content))
            content[at] ^= 1 << rng.randrange(8)
    elif how == "cut":
        content = content[: rng.randrange(len(content) + 1)]
    elif how == "zero" and content:
        at = rng.randrange(len(content))
        content[at : at + 512] = bytes(len(content[at : at + 512]))
    elif how == "extend":
        content += rng.randbytes(rng.randint(1, 200))
    elif how == "swap" and others:
        content = bytearray(
            rng.choice(
                [o for o in others if o.parent.name != target.parent.name] or others
            ).read_bytes()
        )
    elif how == "empty":
        content = bytearray()
    target.write_bytes(content)


ODD = (-1, 0, 1, 2, 999, 2**31 - 1, -(2**31))
ODD_FLOATS = (-1.0, 0.0, 1.5, 1e30, -1e30, 3e38, 1e-40, math.nan, math.inf, -math.inf)


def damage_values(part: Path, rng: random.Random) -> None:
    """Change values of a part's columns to others of their types, or leave out, double or mix its rows."""
    table = pq.read_table(part)
    how = rng.choice(["one", "one", "some", "all", "double", "fewer", "mix"])
    rows = list(range(len(table)))
    if how in ("double", "fewer", "mix"):
        chosen = rows + rng.sample(rows, len(rows) // 2 + 1) if how == "double" else rows
        chosen = rng.sample(rows, len(rows) // 2) if how == "fewer" else chosen
        rng.shuffle(chosen)
        pq.write_table(table.take(pa.array(chosen, pa.int64())), part)
        return
    for place in rng.sample(range(len(table.schema)), rng.randint(1, 3)):
        field = table.schema.field(place)
        values = table[place].to_pylist()
        odd: Any = rng.choice(ODD_FLOATS if pa.types.is_floating(field.type) else ODD)
        odd = odd != 0 if pa.types.is_boolean(field.type) else odd
        odd = valid_text(hostile(rng)) if pa.types.is_string(field.type) else odd
        odd = None if field.nullable and rng.random() < 0.2 else odd
        share = {"one": 0.0, "some": 0.3, "all": 1.0}[how]
        at = rng.randrange(len(values)) if values else 0
        changed = [odd if i == at or rng.random() < share else v for i, v in enumerate(values)]
        kept = (
            pa.array(changed, pa.int64()).cast(field.type, safe=False)
            if pa.types.is_integer(field.type)
            else pa.array(changed, field.type)
        )
        table = table.set_column(place, field, kept)
    pq.write_table(table, part)


def hashes(frame: pd.DataFrame) -> set[str]:
    return set(frame.to_csv(index=False, header=False).splitlines())


WRONG: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        2**31,
        2**63,
        10**30,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "x",
        "\ud800",
    ),
    *([], [[1]], {}, {"a": 1}, "x" * 5000, {"a": {"b": {"c": []}}}, "\x1b[2J\u202e", -0.0, "1"),
]


def replace_anywhere(value: Any, rng: random.Random) -> None:
    """Put a wrong value at a random place of a JSON value."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(value[key], dict | list) and value[key] and rng.random() < 0.7:
            value = value[key]
            continue
        value[key] = rng.choice(WRONG)
        return


def hostile(rng: random.Random) -> str:
    """A text with pieces that terminals, pages, spreadsheets or shells might obey."""
    pieces = [
        *(
            "\x1b]0;owned\x07",
            "\x1b[2J",
            "\x9b31m",
            "\u202e",
            "\u2066",
            "\x00",
            "\r",
            "\x08",
            "\x85",
        ),
        *(
            "<script>alert(1)</script>",
            "<img src=x onerror=alert(2)>",
            "</td></table>",
            "&lt;",
            "]]>",
        ),
        *(
            "=1+1",
            "+cmd|' /C calc'!A0",
            "@SUM(1)",
            "-1|x",
            "[bold red]",
            "[link=file:///etc/passwd]x[/link]",
        ),
        *(
            "{0.__class__}",
            "%s",
            "${HOME}",
            "$(touch pwned)",
            "`touch pwned`",
            "../../etc/passwd",
            "\ud800",
        ),
        *(
            "| a |\n# b",
            "![x](http://evil.example/x)",
            "\u2028",
            "\u2029",
            "漢",
            "é",
            "🙂",
            "\u200b",
            "\U000e0001",
        ),
    ]
    text = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 12)))
    return text.encode("utf-8", "replace").decode() if rng.random() < 0.9 else text


NUMBERS = [
    "1",
    "2.5",
    "-3",
    "nan",
    "inf",
    "-inf",
    "1e308",
    "-1e308",
    "1e-320",
    "9" * 400,
    "",
    "x",
    "true",
    "null",
]


def random_log(rng: random.Random) -> tuple[str, bytes]:
    """Name and content of a log."""
    form = rng.choice(["csv", "jsonl", "json", "bytes", "state", "deep"])
    keys = [
        "step",
        "reward",
        "loss",
        "grad_norm",
        "entropy",
        "kl",
        "train/loss",
        "actor/grad_norm",
        hostile(rng),
    ]
    keys = rng.sample(keys, rng.randint(1, len(keys)))
    count = rng.choice([0, 1, 2, 30])
    if form == "csv":
        lines = [
            ",".join(keys),
            *(",".join(rng.choice(NUMBERS) for _ in keys) for _ in range(count)),
        ]
        return "log.csv", "\n".join(lines).encode("utf-8", "replace")
    if form == "bytes":
        return rng.choice(["log.csv", "log.jsonl", "log.json", "x.txt"]), rng.randbytes(
            rng.randint(0, 500)
        )
    if form == "deep":
        opening, closing = rng.choice([("[", "]"), ('{"a":', "}")])
        depth = rng.choice([50, 5000, 100_000])
        return rng.choice(["log.jsonl", "log.json"]), (
            opening * depth + "1" + closing * depth
        ).encode()

    def row(index: int) -> dict[str, Any]:
        made: dict[str, Any] = {key: rng.choice([*WRONG, index, rng.random()]) for key in keys}
        return made | ({"step": index} if rng.random() < 0.5 else {})

    table = [row(index) for index in range(count)]
    if form == "jsonl":
        odd = rng.choice(["", "\u2028", "\x85", "not json"])
        text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in table) + odd
        return "log.jsonl", text.encode("utf-8", "replace")
    content = {"log_history": table, "global_step": rng.choice(WRONG)} if form == "state" else table
    name = "trainer_state.json" if form == "state" else "log.json"
    return name, json.dumps(content).encode("utf-8", "replace")


def random_yaml(rng: random.Random) -> bytes:
    """A configuration with wrong values, tags, aliases or bytes."""
    odd = [
        "!!python/object/apply:os.system ['touch pwned']",
        "!!python/name:os.system",
        "&a [*a, *a]",
        "{<<: *b}",
        "1e50",
        "[" * 3000,
        "!!binary x",
        "2026-99-99",
        "0o777",
        ".inf",
        "~",
        "'\\ud800'",
        '"\\ud800"',
        "? {a: b}",
        "9" * 5000,
    ]
    fields = ["steps", "seed", "method", "task", "rollout", "optimizer", "policy", "out", "threads"]
    fields += ["rollout.group_size", "health", "probes", hostile(rng).replace("\n", " ")]
    lines = []
    for name in rng.sample(fields, rng.randint(1, 5)):
        value = rng.choice([*odd, *map(repr, WRONG), hostile(rng)])
        lines.append(f"{name}: {value}")
    if rng.random() < 0.2:
        bomb = ["a0: &a0 [x, x]"] + [
            f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]" for n in range(1, 30)
        ]
        lines += bomb
    content = "\n".join(lines).encode("utf-8", "replace")
    return content if rng.random() < 0.9 else content + rng.randbytes(20)


def random_latex(rng: random.Random) -> str:
    """An answer in LaTeX, perhaps one that takes long."""
    pieces = [
        *(
            "9^{9^{9^{9}}}",
            "\\frac{1}{3}",
            "\\sqrt[99]{2}",
            "10^{10^{8}}!",
            "x^{99999}",
            "(x+1)^{9999}",
        ),
        *(
            "\\sum_{n=1}^{10^9} n",
            "\\int_0^1 x^x dx",
            "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
            "\\infty",
        ),
        *(
            "\\binom{99999}{500}",
            "\\{1,2\\}",
            "[0,1)",
            "\\sin(\\cos(x))",
            "0.333",
            "1e-999",
            "\\text{a}",
        ),
        *(
            "__import__('os').system('touch pwned')",
            "lambda: 0",
            "$",
            "{",
            "}",
            "\\",
            "\x00",
            "\ud800",
            "\u202e",
        ),
    ]
    body = rng.choice(["", " + ", " = ", " "]).join(
        rng.choice(pieces) for _ in range(rng.randint(1, 5))
    )
    if rng.random() < 0.2:
        body = "".join(rng.choice(string.printable) for _ in range(rng.randint(1, 400)))
    return rng.choice(["\\boxed{%s}", "<answer>%s</answer>", "#### %s", "%s"]) % body
