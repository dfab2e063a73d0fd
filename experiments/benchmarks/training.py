"""Training: a step against plain PyTorch and TRL, the share of recording, a recorded TRL trainer, start-up, rotation."""

from __future__ import annotations

import hashlib
import itertools
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.benchmarks.common import (
    Cost,
    Row,
    child,
    described,
    plain_gradient,
    random_rows,
    ratios,
    seconds,
)
from sharpscope.config import RunConfig, build_config
from sharpscope.policy import load_policy, render_prompts
from sharpscope.tasks import Example, Reward, make_task
from sharpscope.traces import load_run
from sharpscope.training import Display, train

NEVER = ("rollouts", "tokens", "token_gradients", "rotation", "heldout_influence")
BARE = ("probes.preset=off", *(f"recording.{name}_every=0" for name in NEVER))


def questions(count: int = 512, seed: int = 0) -> tuple[dict[str, list[Example]], Any]:
    """A task for any model: sums after worked examples; the reward is drawn from the completion's text."""
    draw = random.Random(seed)
    worked = "".join(f"{a} + {b} = {a + b}\n" for a, b in ((23, 45), (17, 31), (52, 29)))
    prompts = [
        f"{worked}{draw.randrange(10, 100)} + {draw.randrange(10, 100)} =" for _ in range(count)
    ]

    def score(_: Example, completion: str) -> Reward:
        right = hashlib.sha256(completion.encode()).digest()[0] < 128
        return Reward(float(right), {"drawn": float(right)}, right)

    return {
        "train": [Example(prompt, "") for prompt in prompts],
        "heldout": [Example(prompts[0], "")],
    }, score


def _config(
    model: str, tokens: int, steps: int, folder: str, extra: Sequence[str] = (), size: int = 8
) -> RunConfig:
    """Steps of size × size completions of at most `tokens` tokens, two updates each, without evaluation."""
    values = {
        "policy.model": model,
        "policy.prompt_format": "plain",
        "task.kind": "custom",
        "task.factory": "experiments.benchmarks.training:questions",
        "rollout.prompts_per_step": size,
        "rollout.group_size": size,
        "rollout.max_new_tokens": tokens,
        "update.mini_batches": 2,
        "optimizer.lr": 1e-6,
        "evaluation.every": 0,
        "checkpoint.every": 0,
        "steps": steps,
        "out": folder,
    }
    return build_config(None, extra, values)


class Clock:
    """Costs of the steps of a training without the first; `pause` is called between them, and not timed."""

    def __init__(self, pause: Callable[[], None]) -> None:
        self.costs: list[Cost] = []
        self._pause = pause
        self._begun: tuple[float, float] | None = None

    def mark(self) -> None:
        """A step has ended."""
        if self._begun is not None:
            cpu, wall = self._begun
            self.costs.append(Cost(time.process_time() - cpu, time.perf_counter() - wall, 0))
        self._pause()
        self._begun = time.process_time(), time.perf_counter()


def _mean(costs: Sequence[Cost]) -> Cost:
    return Cost(
        statistics.mean(one.cpu for one in costs), statistics.mean(one.wall for one in costs), 0
    )


def our_steps(config: RunConfig, pause: Callable[[], None]) -> list[Cost]:
    """Costs of the training steps here, without the first."""
    clock = Clock(pause)

    class Steps(Display):
        def step(self, row: Any) -> None:
            clock.mark()

    train(config, display=Steps())
    return clock.costs


def plain_steps(config: RunConfig, pause: Callable[[], None]) -> list[Cost]:
    """The same written straightforwardly in PyTorch: generate with a cache, two forward and backward passes, AdamW."""
    from sharpscope.policy.generation import left_pad

    policy, task = load_policy(config.policy), make_task(config.task)
    model, tokenizer, spec = policy.model, policy.tokenizer, config.rollout
    examples = itertools.cycle(task.splits()["train"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr)
    clock = Clock(pause)
    for _ in range(config.steps):
        batch = list(itertools.islice(examples, spec.prompts_per_step))
        ids, present = left_pad(render_prompts(batch, policy), policy.pad_id)
        ids, present = (x.repeat_interleave(spec.group_size, 0) for x in (ids, present))
        with torch.no_grad():
            out = model.generate(
                input_ids=ids,
                attention_mask=present,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=spec.max_new_tokens,
                pad_token_id=policy.pad_id,
            )
        new = out[:, ids.shape[1] :]
        ended = torch.isin(new, torch.tensor(policy.eos_ids)).int()
        mask = (ended.cumsum(1) - ended == 0).float()
        texts = tokenizer.batch_decode(new, skip_special_tokens=True)
        owners = [example for example in batch for _ in range(spec.group_size)]
        rewards = torch.tensor(
            [task.score(e, text).total for e, text in zip(owners, texts, strict=True)]
        )
        groups = rewards.view(-1, spec.group_size)
        advantage = (
            (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        ).flatten()
        whole = torch.cat([present, mask.long()], 1)
        for part in torch.arange(len(out)).chunk(config.update.mini_batches):
            logits = model(input_ids=out[part], attention_mask=whole[part], use_cache=False).logits
            logp = (
                logits[:, ids.shape[1] - 1 : -1]
                .float()
                .log_softmax(-1)
                .gather(-1, new[part, :, None])[..., 0]
            )
            ratio = (logp - logp.detach()).exp()
            loss = -(advantage[part, None] * ratio * mask[part]).sum() / mask[part].sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        clock.mark()
    return clock.costs


def trl_trainer(config: RunConfig, folder: Path, callbacks: list[Any]) -> Any:
    """TRL's GRPOTrainer with the policy, task, rollouts and optimizer of `config`; one update a step."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    policy, task, rollout = load_policy(config.policy), make_task(config.task), config.rollout
    examples = task.splits()["train"]
    by_prompt = {example.prompt: example for example in examples}

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [
            task.score(by_prompt[p], c).total for p, c in zip(prompts, completions, strict=True)
        ]

    arguments = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=rollout.prompts_per_step * rollout.group_size,
        num_generations=rollout.group_size,
        max_completion_length=rollout.max_new_tokens,
        temperature=rollout.temperature,
        beta=0.0,
        loss_type="grpo",
        learning_rate=config.optimizer.lr,
        lr_scheduler_type="constant",
        max_steps=config.steps,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        use_cpu=policy.device.type == "cpu",
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    make: Any = GRPOTrainer  # its annotations are narrower than what it takes
    return make(
        model=policy.model,
        processing_class=policy.tokenizer,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [example.prompt for example in examples]}),
        callbacks=callbacks,
    )


def trl_steps(
    config: RunConfig, folder: Path, recorded: bool, pause: Callable[[], None]
) -> tuple[list[Cost], list[torch.Tensor]]:
    """Costs of the steps of TRL's trainer without the first, and the final weights; `pause` is called between steps."""
    from transformers import TrainerCallback

    import sharpscope

    clock = Clock(pause)

    class Steps(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.mark()

    trainer = trl_trainer(config, folder / "trl", [Steps()])
    if recorded:
        sharpscope.record(trainer, out=folder / "run")
    trainer.train()
    return clock.costs, [p.detach().clone() for p in trainer.model.parameters()]


def in_turns(*works: Callable[[Callable[[], None]], Any]) -> list[Any]:
    """Call two functions in threads, one at a time: its argument lets the other go on. Each has its own random numbers."""
    turns = threading.Semaphore(1), threading.Semaphore(0)

    def run(index: int) -> Any:
        def pause() -> None:
            states = random.getstate(), np.random.get_state(), torch.get_rng_state()
            turns[1 - index].release()
            turns[index].acquire()
            for restore, state in zip(
                (random.setstate, np.random.set_state, torch.set_rng_state), states, strict=True
            ):
                restore(state)

        turns[index].acquire()
        try:
            return works[index](pause)
        finally:
            turns[1 - index].release(10_000)  # the other goes on alone

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def step(model: str, steps: int, size: int, lengths: Sequence[int] = (16, 64)) -> list[Row]:
    """A step of 16 and of 64 tokens against plain PyTorch and, with one update, against TRL, step by step in turns."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for tokens in lengths:
            what = f"a step, {size * size} × {tokens} tokens"
            two = _config(model, tokens, steps + 1, f"{folder}/two-{tokens}", BARE, size)
            found = in_turns(partial(our_steps, two), partial(plain_steps, two))
            rows.append(_step_row(f"{what}, two updates, against plain PyTorch", *found, 1.5, 2))
            bare = (*BARE, "update.mini_batches=1")
            one = _config(model, tokens, steps + 1, f"{folder}/one-{tokens}", bare, size)
            ours, (theirs, _) = in_turns(
                partial(our_steps, one), partial(trl_steps, one, Path(folder) / str(tokens), False)
            )
            rows.append(_step_row(f"{what}, one update, against TRL", ours, theirs, 2, 3))
    return rows


def _step_row(
    what: str, ours: Sequence[Cost], theirs: Sequence[Cost], required: float, stretch: float
) -> Row:
    note = f"{seconds(ours)} against {seconds(theirs)}"
    limits = f"≥ {required:g}", f"≥ {stretch:g}"
    return Row.of_turns(what, ratios(theirs, ours), "×", *limits, note)


def recording(model: str, steps: int, size: int, repeats: int) -> list[Row]:
    """Share of a run that recording takes, with the default settings, in several runs."""
    shares, spent = [], []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(repeats + 1):
            config = _config(model, 16, steps, f"{folder}/{turn}", (f"seed={turn}",), size)
            measuring = load_run(train(config).run_dir).info["measuring"]
            if turn:  # the first run is not counted
                shares.append(100 * float(measuring["share"]))
                spent.append(measuring["seconds"])
    note = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in spent[0].items())
    what = f"recording by default, run of {steps} steps"
    return [Row.of_turns(what, shares, "%", "≤ 10", "≤ 5", f"of the first that counts: {note}")]


def recorded_trl(model: str, steps: int, size: int) -> list[Row]:
    """A TRL trainer recorded with the defaults against the same not recorded, step by step in turns; both must end with equal weights."""
    with tempfile.TemporaryDirectory() as folder:
        config = _config(model, 16, steps + 1, f"{folder}/x", ("update.mini_batches=1",), size)
        (recorded, weights), (plain, same) = in_turns(
            *(
                partial(trl_steps, config, Path(folder) / str(recorded), recorded)
                for recorded in (True, False)
            )
        )
    equal = all(map(torch.equal, weights, same))
    turns = ratios(recorded, plain)
    means = f"ratio of the means {_mean(recorded).over(_mean(plain)):.3g} ×"
    note = f"{means}; final weights are {'equal' if equal else 'NOT equal'} bit for bit"
    what = f"{steps} recorded TRL steps against not recorded"
    return [Row.of_turns(what, turns, "×", "≤ 1.12", "≤ 1.05", note)]


# Stops at the first draw and prints the seconds since the parent started the command.
FIRST_TOKEN = """
import sys, time
import sharpscope.cli
import sharpscope.policy.decoding as decoding
draw = decoding.draw
def first(*arguments, **named):
    draw(*arguments, **named)
    print(time.time() - float(sys.argv[1]), flush=True)
    raise SystemExit
decoding.draw = first
sharpscope.cli.main(["run", "--quiet", "--out", "runs/first"])
"""


WRONG_OPTION = ("-m", "sharpscope", "run", "--method", "grpo-sq")


def startup(repeats: int) -> list[Row]:
    """Processor seconds from `run` to the first token and of a mistake in an option, after a first call."""
    first, mistake, needed = [], [], []
    for _ in range(repeats + 1):
        with tempfile.TemporaryDirectory() as folder:
            _, cpu, said = child(["-c", FIRST_TOKEN, str(time.time())], folder)
            first.append(float(said.split()[-1]))
            needed.append(cpu)
            mistake.append(child([*WRONG_OPTION], folder, allowed=(2,))[1])
    note = f"{statistics.median(first[1:]):.3g} s of wall time"
    what = "`run` to the first token, embedded policy"
    return [
        Row.of_turns(what, needed[1:], "s", "≤ 4", "≤ 3", note),
        Row.of_turns("a mistake in an option", mistake[1:], "s", "≤ 0.5"),
    ]


TEN = (
    "grpo",
    "grpo-sg",
    "tr-grpo",
    "ar-lopti",
    "gspo",
    "dapo",
    "cov-grpo",
    "cispo",
    "dr-grpo",
    "grpo-sg-reverse",
)


def rotation(model: str, size: int, repeats: int, methods: Sequence[str] = TEN) -> list[Row]:
    """Rotation of ten methods on one batch: processor time a method, in gradients of the same number of tokens."""
    found = [_rotation(model, size, methods) for _ in range(repeats + 1)][1:]
    turns, notes = zip(*found, strict=True)
    what = "rotation, a method, in gradients"
    return [Row.of_turns(what, turns, "gradients", "≤ 1.3", "≤ 1.05", notes[-1])]


def _rotation(model: str, size: int, methods: Sequence[str]) -> tuple[float, str]:
    from sharpscope.forks import rotate

    marks: list[float] = []
    sizes = [
        f"rollout.prompts_per_step={size}",
        f"rollout.group_size={size}",
        "rollout.max_new_tokens=16",
    ]
    found = rotate(
        methods,
        model=model,
        task="experiments.benchmarks.training:questions",
        overrides=["policy.prompt_format=plain", *sizes],
        batches=1,
        on_progress=lambda text: marks.append(time.process_time()),
    )
    # marks[0]: drawing; then one at the start of each method
    spent = (time.process_time() - marks[1]) / len(methods)
    policy = load_policy(build_config(None, [f"policy.model={model}"]).policy)
    prompt = len(render_prompts([questions(1)[0]["train"][0]], policy)[0])
    rows = int(found.batch["completions"])
    ids, _ = random_rows(policy.model, rows, prompt + round(found.batch["tokens"] / rows))
    gradient = plain_gradient(policy.model, ids)
    gradient()
    began = time.process_time()
    gradient()
    once = time.process_time() - began
    note = f"{spent:.3g} s a method, {once:.3g} s a gradient of {tuple(ids.shape)} tokens; {described(policy.model)}"
    return spent / once, note
