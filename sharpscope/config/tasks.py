"""Configuration of the tasks, one model per kind."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from sharpscope.settings.base import Spec


def _check_apart(name: str, seen: tuple[int, ...], unseen: tuple[int, ...]) -> None:
    both = sorted(set(seen) & set(unseen))
    if both:
        raise ValueError(
            f"unseen_{name}: {both} are also in {name}; remove them from one of the two"
        )


def _with_prompt(template: str) -> str:
    if template and "{prompt}" not in template:
        raise ValueError("must contain {prompt}, which the question replaces")
    return template


People = Annotated[int, Field(ge=2, le=7)]
Level = Annotated[int, Field(ge=1, le=4)]
Template = Annotated[str, AfterValidator(_with_prompt)]


class KnightsKnavesSpec(Spec):
    """Generated Knights-and-Knaves puzzles with exactly one solution."""

    kind: Literal["knights_knaves"] = "knights_knaves"
    people: People | Annotated[tuple[People, ...], Field(min_length=1)] = 3
    """people per puzzle in train and heldout: one number or a list, 2 to 7"""
    train_size: int = Field(
        900,
        ge=1,
        le=1_000_000,
        description="training puzzles for each number of people",
    )
    heldout_size: int = Field(500, ge=0, le=1_000_000)
    """held-out puzzles for each number of people; 0: no such split"""
    unseen_people: tuple[People, ...] = ()
    """numbers of people in the split `unseen`, not used in training, 2 to 7"""
    unseen_size: int = Field(
        200,
        ge=0,
        le=1_000_000,
        description="puzzles for each unseen number of people",
    )
    style: Literal["compact", "logic_rl"] = "compact"
    """prompt: the puzzle alone, or Logic-RL's chat prompt ending with <think>"""
    seed: int = Field(0, ge=0, description="seed of the puzzles (not of training)")

    @property
    def sizes(self) -> tuple[int, ...]:
        """`people` as a tuple."""
        return (self.people,) if isinstance(self.people, int) else self.people

    @model_validator(mode="after")
    def _apart(self) -> KnightsKnavesSpec:
        _check_apart("people", self.sizes, self.unseen_people)
        return self


class MathSpec(Spec):
    """Generated mathematics questions, each with a number as its answer."""

    kind: Literal["math"] = "math"
    families: tuple[Literal["arithmetic", "linear", "modular"], ...] = Field(
        ("arithmetic",), min_length=1
    )
    """families of questions"""
    levels: tuple[Level, ...] = Field((1, 2, 3), min_length=1)
    """levels of difficulty in train and heldout, 1 to 4"""
    unseen_levels: tuple[Level, ...] = ()
    """levels of difficulty in the split `unseen`, not used in training, 1 to 4"""
    train_size: int = Field(
        300,
        ge=1,
        le=1_000_000,
        description="training questions for each family and level",
    )
    heldout_size: int = Field(100, ge=0, le=1_000_000)
    """held-out questions for each family and level; 0: none"""
    unseen_size: int = Field(
        100,
        ge=0,
        le=1_000_000,
        description="questions for each family and unseen level",
    )
    template: Template = Field(
        "{prompt}\n", description="prompt template; the question replaces {prompt}"
    )
    seed: int = Field(0, ge=0, description="seed of the questions (not of training)")

    @model_validator(mode="after")
    def _apart(self) -> MathSpec:
        _check_apart("levels", self.levels, self.unseen_levels)
        return self


class ColumnsSpec(Spec):
    """Column names of a data set; a dot selects a nested column (`reward_model.ground_truth`)."""

    prompt: str = ""
    """the question: text, or a list of chat messages with role and content; empty: the one that exists of prompt,
    question, problem and messages"""
    answer: str = ""
    """reference answer for the scorer; empty: reward_model.ground_truth, or the one that exists of answer, solution,
    ground_truth and label"""


class DatasetSpec(Spec):
    """Questions and answers from a file or a folder."""

    kind: Literal["dataset"] = "dataset"
    path: str = Field(
        "", description=".parquet or .jsonl (JSON Lines) file, or a folder of such files"
    )
    columns: ColumnsSpec = Field(ColumnsSpec(), description="column mapping")
    scorer: Literal["auto", "logic_rl", "exact", "exact_match", "numeric", "math"] = "auto"
    """auto: selected by the row's data_source; without one: math for LaTeX, numeric for numbers, exact_match for
    other answers"""
    template: Template = ""
    """prompt template; the question replaces {prompt}; empty: the question unchanged, as one with chat markup always
    is"""
    heldout_fraction: float = Field(0.1, ge=0, lt=1)
    """share of the questions held out, selected by content hash; 0: none"""
    heldout_path: str = Field(
        "", description="file or folder of a separate held-out set; replaces heldout_fraction"
    )


class CustomSpec(Spec):
    """A user-defined task in Python."""

    kind: Literal["custom"] = "custom"
    factory: str = Field("", description="module:function")
    options: dict[str, object] = Field({}, description="keyword arguments of the factory")


class ToolQaSpec(Spec):
    """Questions that require search, in Search-R1's protocol: generated, or a data set with a retrieval server."""

    kind: Literal["tool_qa"] = "tool_qa"
    hops: tuple[Annotated[int, Field(ge=1, le=3)], ...] = Field((1,), min_length=1)
    """facts to chain in train and heldout, 1 to 3"""
    train_size: int = Field(
        300,
        ge=1,
        le=1_000_000,
        description="training questions for each number of hops",
    )
    heldout_size: int = Field(100, ge=0, le=1_000_000)
    """held-out questions for each number of hops; 0: none"""
    questions: DatasetSpec | None = None
    """data set of questions instead of generated ones; scorer auto = exact_match"""
    retriever_url: str = ""
    """URL of a retrieval server with Search-R1's API; empty: BM25 over the generated world"""
    top: int = Field(3, ge=1, le=100, description="passages returned per search")
    turns: int = Field(4, ge=1, le=100)
    """maximum number of replies from the environment, searches and feedback together"""
    style: Literal["compact", "search_r1"] = "compact"
    """prompt: the question alone, or with Search-R1's instruction"""
    seed: int = Field(0, ge=0, description="seed of the world and the questions (not of training)")

    @model_validator(mode="after")
    def _consistent(self) -> ToolQaSpec:
        if self.questions is not None and not self.retriever_url:
            raise ValueError("questions: needs passages to search; set retriever_url")
        if self.questions is not None and self.questions.scorer == "logic_rl":
            raise ValueError(
                "questions.scorer = logic_rl: scores puzzles only; use exact_match or another"
            )
        return self


TaskSpec = Annotated[
    KnightsKnavesSpec | MathSpec | ToolQaSpec | DatasetSpec | CustomSpec,
    Field(discriminator="kind"),
]
"""Configuration of any task; the field `kind` selects the model."""
