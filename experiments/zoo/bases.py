"""The healthy trainings that a cause is planted in: TRL's GRPO, a plain GRPO loop, SFT and DPO, all on the embedded policy `math`."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import sharpscope
from sharpscope.errors import UserError
from sharpscope.packaged import data_path

POLICY = str(data_path("policies", "math"))
END, PAD = 1, 0
RECORDING = {"token_gradients_every": 4}
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a training writes, and what it draws from: its folder gets `run` and the user's own log."""

    folder: Path
    seed: int
    steps: int | None = None  # None: as many as the case needs

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)


# -- Data


@dataclass(frozen=True)
class Problem:
    """An arithmetic problem with its steps, as the embedded policy writes them."""

    text: str
    steps: tuple[str, ...]
    value: int

    @property
    def prompt(self) -> str:
        return f"{self.text} = ?\n"

    def solution(self, value: int | None = None) -> str:
        """A completion of the policy's form that ends in `value`, or in the right one."""
        answer = self.value if value is None else value
        *first, last = self.steps
        thought = "; ".join([*first, f"{last} = {answer}"])
        return f"<think>{thought}</think><answer>{answer}</answer>"


def apply(operation: str, left: int, right: int) -> int:
    """The result of + - or *."""
    return {"+": left + right, "-": left - right, "*": left * right}[operation]


def problem(draw: random.Random) -> Problem:
    """A problem of one or two operations."""
    kind = draw.random()
    a, b, c = draw.randint(2, 20), draw.randint(2, 20), draw.randint(2, 9)
    if kind < 0.35:
        sign = draw.choice("+-*")
        return Problem(f"{a} {sign} {b}", (f"{a} {sign} {b}",), apply(sign, a, b))
    sign = draw.choice("+-")
    if kind < 0.7:
        inner = apply(sign, a, b)
        steps = (f"{a} {sign} {b} = {inner}", f"{inner} * {c}")
        return Problem(f"({a} {sign} {b}) * {c}", steps, inner * c)
    inner = b * c
    steps = (f"{b} * {c} = {inner}", f"{a} {sign} {inner}")
    return Problem(f"{a} {sign} {b} * {c}", steps, apply(sign, a, inner))


def problems(count: int, seed: int) -> list[Problem]:
    """Different problems."""
    draw, found = random.Random(seed), dict[str, Problem]()
    while len(found) < count:
        one = problem(draw)
        found.setdefault(one.text, one)
    return list(found.values())


def prompts(seed: int, count: int = 200) -> list[Row]:
    """Rows of a data set for GRPO."""
    return [{"prompt": p.prompt, "answer": str(p.value)} for p in problems(count, 1000 + seed)]


def demonstrations(seed: int, count: int = 800) -> list[Row]:
    """Rows of a data set for SFT."""
    draw = random.Random(2000 + seed)
    drawn = [problem(draw) for _ in range(count)]
    return [{"prompt": p.prompt, "completion": p.solution()} for p in drawn]


def pairs(seed: int, count: int = 600) -> list[Row]:
    """Rows of a data set for DPO: the rejected completion ends in a wrong number."""
    draw = random.Random(3000 + seed)
    rows = []
    for _ in range(count):
        one = problem(draw)
        wrong = one.value + draw.choice([-10, -2, -1, 1, 2, 10])
        row = {"chosen": one.solution(), "rejected": one.solution(wrong)}
        rows.append({"prompt": one.prompt} | row)
    return rows


def answer_of(text: str) -> str | None:
    """What stands between the answer's tags."""
    match = re.search(r"<answer>(.*?)</answer>", text.replace(" ", ""))
    return match[1] if match else None


def accuracy(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Reward 1 for the right answer."""
    return [float(answer_of(c) == a) for c, a in zip(completions, answer, strict=True)]


# -- Models


def policy() -> tuple[Any, Any]:
    """The embedded policy and its tokenizer."""
    return AutoModelForCausalLM.from_pretrained(POLICY), AutoTokenizer.from_pretrained(POLICY)


def untrained(seed: int) -> Any:
    """The embedded policy's architecture with random weights, so that SFT has something to learn."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(POLICY))


# -- TRL and transformers


def arguments(place: Place, **changed: Any) -> dict[str, Any]:
    """Arguments that all trainers share."""
    fixed = {
        "output_dir": str(place.folder / "trainer"),
        "use_cpu": True,
        "bf16": False,
        "seed": place.seed,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
    }
    return fixed | changed


def train(trainer: Any, place: Place, **options: Any) -> None:
    """Record a trainer and train it; a refusal and an error are written down beside the run."""
    settings = {"recording": RECORDING, "critical_sharpness": False} | options
    try:
        sharpscope.record(trainer, out=place.folder / "run", **settings)
    except UserError as error:
        (place.folder / "refused.txt").write_text(str(error))
    try:
        trainer.train()
    except (RuntimeError, ValueError) as error:
        (place.folder / "crash.txt").write_text(repr(error))
    trainer.state.save_to_json(str(place.folder / "trainer_state.json"))


def trl_grpo(
    place: Place,
    *,
    steps: int = 16,
    rewards: tuple[Callable[..., list[float]], ...] = (accuracy,),
    rows: list[Row] | None = None,
    model: Any = None,
    tokenizer: Any = None,
    peft_config: Any = None,
    **changed: Any,
) -> None:
    """TRL's GRPOTrainer: 8 prompts × 8 completions."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    ours, words = policy()
    own = {
        "max_steps": place.steps or steps,
        "learning_rate": 5e-4,
        "per_device_train_batch_size": 64,
        "num_generations": 8,
        "max_completion_length": 40,
        "temperature": 1.0,
        "top_k": 0,
    }
    trainer = GRPOTrainer(
        model=model or ours,
        reward_funcs=list(rewards),
        args=GRPOConfig(**arguments(place, **own | changed)),
        processing_class=tokenizer or words,
        peft_config=peft_config,
        train_dataset=Dataset.from_list(rows or prompts(place.seed)),
    )
    train(trainer, place, correct=0.5)


def trl_sft(
    place: Place,
    *,
    steps: int = 40,
    rows: list[Row] | None = None,
    collator: Any = None,
    peft_config: Any = None,
    **changed: Any,
) -> None:
    """TRL's SFTTrainer from random weights."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    own = {
        "max_steps": place.steps or steps,
        "learning_rate": 3e-3,
        "per_device_train_batch_size": 16,
        "warmup_steps": 5,
        "max_length": 128,
    }
    trainer = SFTTrainer(
        model=untrained(place.seed),
        processing_class=policy()[1],
        train_dataset=Dataset.from_list(rows or demonstrations(place.seed)),
        data_collator=collator,
        peft_config=peft_config,
        args=SFTConfig(**arguments(place, **own | changed)),
    )
    train(trainer, place)


def hf_sft(
    place: Place, collate: Callable[[list[Row]], dict[str, Tensor]], steps: int = 40
) -> None:
    """transformers' Trainer with a collator of the user's own."""
    from transformers import Trainer, TrainingArguments

    own = {
        "max_steps": place.steps or steps,
        "learning_rate": 3e-3,
        "per_device_train_batch_size": 16,
        "warmup_steps": 5,
        "remove_unused_columns": False,
    }
    trainer = Trainer(
        model=untrained(place.seed),
        processing_class=policy()[1],
        train_dataset=demonstrations(place.seed),
        data_collator=collate,
        args=TrainingArguments(**arguments(place, **own)),
    )
    train(trainer, place)


def trl_dpo(
    place: Place, *, steps: int = 30, rows: list[Row] | None = None, **changed: Any
) -> None:
    """TRL's DPOTrainer."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    model, tokenizer = policy()
    own = {
        "max_steps": place.steps or steps,
        "learning_rate": 2e-4,
        "per_device_train_batch_size": 16,
        "beta": 0.1,
        "max_length": 128,
    }
    trainer = DPOTrainer(
        model=model,
        ref_model=copy.deepcopy(model),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows or pairs(place.seed)),
        args=DPOConfig(**arguments(place, **own | changed)),
    )
    train(trainer, place)


# -- A loop as people write it


@dataclass(kw_only=True)
class Batch:
    """One step of the loop: N rows of L = P + T columns."""

    prompts: list[Row]  # one for each row
    ids: Tensor  # (N, L)
    attention: Tensor  # (N, L)
    mask: Tensor  # (N, L) 1 on the tokens in the loss
    ended: Tensor  # (N,) whether the completion has its end token
    rewards: Tensor  # (N,)
    advantages: Tensor  # (N,)
    old: Tensor  # (N, L - 1)
    sampler: Tensor  # (N, L - 1)
    ref: Tensor | None  # (N, L - 1)

    @property
    def inside(self) -> Tensor:
        """(N, L - 1) the mask on the columns of log-probabilities."""
        return self.mask[:, 1:].float()


class Loop:
    """GRPO in a plain loop; a cause overrides one method."""

    steps: ClassVar[int] = 16
    lr: ClassVar[float] = 5e-4
    groups: ClassVar[int] = 8
    group: ClassVar[int] = 8
    length: ClassVar[int] = 40
    beta: ClassVar[float] = 0.0
    epochs: ClassVar[int] = 1
    micro: ClassVar[int] = 1
    clip: ClassVar[float] = 0.2
    temperature: ClassVar[float] = 1.0
    entropy_bonus: ClassVar[float] = 0.0
    max_norm: ClassVar[float] = 1.0
    tell_sampler: ClassVar[bool] = True

    def __init__(self, place: Place) -> None:
        self.place = place
        torch.manual_seed(place.seed)
        self.model, self.tokenizer = policy()
        self.reference = copy.deepcopy(self.model).eval() if self.beta else None
        self.rows = prompts(place.seed)
        self.prepare()

    def prepare(self) -> None:
        """Make the optimizer and set the mode."""
        self.optimizer = self.make_optimizer()
        self.model.eval()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=self.lr, weight_decay=0.0)

    def sampler(self) -> Any:
        """The model that generates."""
        return self.model

    def sampling(self) -> dict[str, Any]:
        """How completions are drawn."""
        return {"temperature": self.temperature, "top_k": 0}

    def reward(self, text: str, row: Row) -> float:
        return float(answer_of(text) == row["answer"])

    def encode(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        """Ids and attention mask, padded on the left."""
        options = {"return_tensors": "pt", "padding": True, "padding_side": "left"}
        encoded = self.tokenizer(texts, return_token_type_ids=False, **options)
        return encoded["input_ids"], encoded["attention_mask"]

    def encode_for_training(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        return self.encode(texts)

    def logits(self, model: Any, ids: Tensor, attention: Tensor) -> Tensor:
        """(n, L - 1, V) logits of the next token."""
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        output = model(input_ids=ids, attention_mask=attention, position_ids=positions)
        return output.logits[:, :-1]

    def logp(self, model: Any, ids: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
        """(n, L - 1) log-probabilities of the tokens and entropies."""
        logp = (self.logits(model, ids, attention) / self.temperature).log_softmax(-1)
        return logp.gather(2, ids[:, 1:, None])[..., 0], -(logp.exp() * logp).sum(-1)

    @torch.no_grad()
    def sampler_logp(self, ids: Tensor, attention: Tensor) -> Tensor:
        """(n, L - 1) log-probabilities as the sampler has them, after temperature."""
        heat = self.sampling()["temperature"]
        logp = (self.logits(self.sampler(), ids, attention) / heat).log_softmax(-1)
        return logp.gather(2, ids[:, 1:, None])[..., 0]

    @torch.no_grad()
    def generate(self, ids: Tensor, attention: Tensor) -> Tensor:
        """(N, T) completions, padded after the end token."""
        engine = self.sampler()
        training = engine.training
        engine.eval()
        options = {"pad_token_id": PAD, "eos_token_id": END, "max_new_tokens": self.length}
        whole = engine.generate(
            input_ids=ids, attention_mask=attention, do_sample=True, **options, **self.sampling()
        )
        engine.train(training)
        return whole[:, ids.shape[1] :]

    def completion_mask(self, completions: Tensor) -> Tensor:
        """(N, T) 1 up to and with the end token."""
        ends = (completions == END).long().cumsum(1)
        return ((ends == 0) | ((ends == 1) & (completions == END))).long()

    def loss_mask(self, ids: Tensor, width: int, inside: Tensor) -> Tensor:
        """(N, L) 1 on the tokens in the loss."""
        return torch.cat([torch.zeros(len(ids), width, dtype=torch.long), inside], 1)

    def score(self, texts: list[str], rows: list[Row]) -> Tensor:
        return torch.tensor([self.reward(t, r) for t, r in zip(texts, rows, strict=True)])

    def advantages(self, rewards: Tensor) -> Tensor:
        grouped = rewards.view(-1, self.group)
        centered = grouped - grouped.mean(1, keepdim=True)
        return (centered / (grouped.std(1, keepdim=True) + 1e-4)).flatten()

    def arrange(self, chosen: list[Row]) -> list[Row]:
        """One prompt for each row."""
        return [row for row in chosen for _ in range(self.group)]

    def old_logp(self, ids: Tensor, attention: Tensor) -> Tensor:
        with torch.no_grad():
            return self.logp(self.model, ids, attention)[0]

    def make_batch(self, step: int) -> Batch:
        """Draw and score the completions of a step."""
        chosen = self.arrange(self.draw.sample(self.rows, self.groups))
        texts = [row["prompt"] for row in chosen]
        drawn_from = self.encode(texts)
        completions = self.generate(*drawn_from)
        inside = self.completion_mask(completions)
        kept = [c[m.bool()] for c, m in zip(completions, inside, strict=True)]
        written = [self.tokenizer.decode(c, skip_special_tokens=True) for c in kept]
        rewards = self.score(written, chosen)
        sampled = torch.cat([drawn_from[0], completions], 1)
        seen = torch.cat([drawn_from[1], inside], 1)
        behavior = self.sampler_logp(sampled, seen)[:, -completions.shape[1] :]
        ids, attention = self.encode_for_training(texts)
        width = ids.shape[1]
        ids = torch.cat([ids, completions], 1)
        attention = torch.cat([attention, inside], 1)
        old = self.old_logp(ids, attention)
        sampler = torch.zeros_like(old)
        sampler[:, -completions.shape[1] :] = behavior
        ref = None
        if self.reference is not None:
            with torch.no_grad():
                ref = self.logp(self.reference, ids, attention)[0]
        return Batch(
            prompts=chosen,
            ids=ids,
            attention=attention,
            mask=self.loss_mask(ids, width, inside),
            ended=(completions == END).any(1),
            rewards=rewards,
            advantages=self.advantages(rewards),
            old=old,
            sampler=sampler,
            ref=ref,
        )

    def ratio(self, logp: Tensor, old: Tensor) -> Tensor:
        return (logp - old).exp()

    def policy_loss(self, logp: Tensor, batch: Batch, rows: Tensor) -> Tensor:
        """PPO's clipped surrogate, a mean over the tokens of the batch."""
        ratio = self.ratio(logp, batch.old[rows])
        advantage = batch.advantages[rows, None]
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        surrogate = torch.minimum(ratio * advantage, clipped * advantage)
        return -(surrogate * batch.inside[rows]).sum() / batch.inside.sum()

    def kl(self, logp: Tensor, batch: Batch, rows: Tensor) -> Tensor:
        """k3 to the reference, a mean over the tokens of the batch."""
        assert batch.ref is not None
        gap = batch.ref[rows] - logp
        return ((gap.exp() - gap - 1) * batch.inside[rows]).sum() / batch.inside.sum()

    def kl_weight(self) -> float:
        return self.beta

    def tell(self, recorder: Any, logp: Tensor, batch: Batch, rows: Tensor) -> None:
        """The recorder's line."""
        known: dict[str, Any] = {
            "old_logp": batch.old[rows],
            "advantages": batch.advantages[rows],
            "rewards": batch.rewards[rows],
            "groups": rows // self.group,
        }
        if self.tell_sampler:
            known["sampler_logp"] = batch.sampler[rows]
        if batch.ref is not None:
            known["ref_logp"] = batch.ref[rows]
        seen = batch.attention[rows]
        recorder.tokens(logp, batch.ids[rows], batch.mask[rows], attention_mask=seen, **known)

    def between(self) -> None:
        """After each micro-batch's backward pass."""

    def clear(self) -> None:
        """Clear the gradients after an update."""
        self.model.zero_grad()

    def update(self, recorder: Any, batch: Batch) -> dict[str, float]:
        """One optimizer step on a batch; returns what the user logs."""
        sums = dict.fromkeys(("loss", "entropy", "kl"), 0.0)
        for rows in torch.arange(len(batch.ids)).chunk(self.micro):
            logp, entropy = self.logp(self.model, batch.ids[rows], batch.attention[rows])
            self.tell(recorder, logp, batch, rows)
            loss = self.policy_loss(logp, batch, rows)
            mean_entropy = (entropy * batch.inside[rows]).sum() / batch.inside.sum()
            if self.reference is not None:
                divergence = self.kl(logp, batch, rows)
                loss = loss + self.kl_weight() * divergence
                sums["kl"] += float(divergence.detach())
            if self.entropy_bonus:
                loss = loss - self.entropy_bonus * mean_entropy
            loss.backward()
            self.between()
            sums["loss"] += float(loss.detach())
            sums["entropy"] += float(mean_entropy.detach())
        recorder.step(sums["loss"])
        limit = self.max_norm or 1e9
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        self.clear()
        return sums | {"grad_norm": float(norm)}

    def log_row(self, step: int, batch: Batch, values: dict[str, float]) -> dict[str, float]:
        """A row of the user's own log, with the names that TRL uses."""
        grouped = batch.rewards.view(-1, self.group)
        lengths = batch.inside.sum(1)
        row = {
            "step": step,
            "loss": values["loss"],
            "reward": float(batch.rewards.mean()),
            "reward_std": float(grouped.std(1).mean()),
            "grad_norm": values["grad_norm"],
            "entropy": values["entropy"],
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "completions/mean_length": float(lengths.mean()),
            "completions/clipped_ratio": float((~batch.ended).float().mean()),
            "frac_reward_zero_std": float((grouped.std(1) == 0).float().mean()),
        }
        if self.reference is not None:
            row["kl"] = values["kl"]
        if self.tell_sampler:
            gap = ((batch.old - batch.sampler).abs() * batch.inside).sum() / batch.inside.sum()
            row["sampling/sampling_logp_difference/mean"] = float(gap)
        return row

    def run(self) -> None:
        """Train, recorded, with a log of JSON lines."""
        steps = self.place.steps or self.steps
        self.draw = random.Random(4000 + self.place.seed)
        recorder = sharpscope.record(
            self.model,
            self.optimizer,
            tokenizer=self.tokenizer,
            out=self.place.folder / "run",
            steps=steps,
            updates_per_step=self.epochs,
            temperature=self.temperature,
            recording=RECORDING,
            critical_sharpness=False,
            correct=0.5,
        )
        with (self.place.folder / "log.jsonl").open("w") as log, recorder:
            for step in range(1, steps + 1):
                torch.manual_seed(10_000 * (self.place.seed + 1) + step)
                batch = self.make_batch(step)
                for _ in range(self.epochs):
                    values = self.update(recorder, batch)
                log.write(json.dumps(self.log_row(step, batch, values)) + "\n")
