"""What a run may ask of a task: one typed, documented part of the configuration for each kind."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, model_validator

from sharpscope.config.base import Spec

T = TypeVar("T")


def _distinct(values: tuple[T, ...]) -> tuple[T, ...]:
    if len(set(values)) != len(values):
        raise ValueError(f"{list(values)} names one thing twice")
    return values


def _with_prompt(template: str) -> str:
    if template and "{prompt}" not in template:
        raise ValueError("the question has no place: write {prompt} in the template")
    return template


People = Annotated[int, Field(ge=2, le=7)]
Level = Annotated[int, Field(ge=1, le=4)]
Template = Annotated[str, AfterValidator(_with_prompt)]
Sizes = Annotated[tuple[People, ...], AfterValidator(_distinct)]


class KnightsKnavesSpec(Spec):
    """Generated Knights-and-Knaves puzzles with exactly one solution."""

    kind: Literal["knights_knaves"] = "knights_knaves"
    people: People | Annotated[Sizes, Field(min_length=1)] = Field(
        3, description="people per puzzle in train and heldout: one number or a list, 2 to 7"
    )
    train_size: int = Field(900, ge=1, le=1_000_000, description="training puzzles for each number of people")
    heldout_size: int = Field(
        500, ge=0, le=1_000_000, description="held-out puzzles for each number of people; 0: no such split"
    )
    unseen_people: Sizes = Field((), description="numbers of people that training never sees (split `unseen`), 2 to 7")
    unseen_size: int = Field(200, ge=0, le=1_000_000, description="puzzles for each unseen number of people")
    depth: int = Field(
        2, ge=2, le=4, description="deepest nesting of a statement [levels]; at 1 no puzzle has one solution"
    )
    width: int = Field(2, ge=2, le=5, description="most operands of one and/or")
    style: Literal["compact", "logic_rl"] = Field(
        "compact", description="prompt: the puzzle alone, or Logic-RL's chat text that ends in an opened <think>"
    )
    seed: int = Field(0, ge=0, description="seed of the puzzles (not of training)")

    @property
    def sizes(self) -> tuple[int, ...]:
        """`people` as a tuple."""
        return (self.people,) if isinstance(self.people, int) else self.people

    @model_validator(mode="after")
    def _possible(self) -> KnightsKnavesSpec:
        both = set(self.sizes) & set(self.unseen_people)
        if both:
            raise ValueError(f"unseen_people: {sorted(both)} also stand in people; a size is either seen or unseen")
        # the sampler wants `width` different elementary claims; there are 2n − 1, all but "I am a knave"
        smallest = min((*self.sizes, *self.unseen_people))
        if self.width > 2 * smallest - 1:
            raise ValueError(
                f"width: {self.width} different claims do not exist for {smallest} people; at most {2 * smallest - 1}"
            )
        return self


class MathSpec(Spec):
    """Generated mathematics with answers that math-verify checks."""

    kind: Literal["math"] = "math"
    families: Annotated[tuple[Literal["arithmetic", "linear", "modular", "word"], ...], AfterValidator(_distinct)] = (
        Field(("arithmetic",), min_length=1, description="kinds of question")
    )
    levels: Annotated[tuple[Level, ...], AfterValidator(_distinct)] = Field(
        (1, 2, 3), min_length=1, description="difficulty in train and heldout, 1 to 4"
    )
    unseen_levels: Annotated[tuple[Level, ...], AfterValidator(_distinct)] = Field(
        (), description="difficulties that training never sees (split `unseen`), 1 to 4"
    )
    train_size: int = Field(300, ge=1, le=1_000_000, description="training questions for each family and level")
    heldout_size: int = Field(
        100, ge=0, le=1_000_000, description="held-out questions for each family and level; 0: none"
    )
    unseen_size: int = Field(100, ge=0, le=1_000_000, description="questions for each family and unseen level")
    template: Template = Field("{prompt}\n", description="text around the question, with {prompt} in it")
    time_limit: float = Field(
        5.0, gt=0, le=600, description="most time for checking one answer [s]; a longer one is wrong"
    )
    seed: int = Field(0, ge=0, description="seed of the questions (not of training)")

    @model_validator(mode="after")
    def _apart(self) -> MathSpec:
        both = set(self.levels) & set(self.unseen_levels)
        if both:
            raise ValueError(f"unseen_levels: {sorted(both)} also stand in levels; a level is either seen or unseen")
        return self


class GymSpec(Spec):
    """Any data set of reasoning-gym, with its own scorer."""

    kind: Literal["gym"] = "gym"
    name: str = Field("", description="the data set's name in reasoning-gym")
    options: dict[str, Any] = Field({}, description="options of the data set, as reasoning-gym names them")
    train_size: int = Field(900, ge=1, le=1_000_000, description="training questions")
    heldout_size: int = Field(200, ge=0, le=1_000_000, description="held-out questions; 0: none")
    template: Template = Field("{prompt}\n", description="text around the question, with {prompt} in it")
    allow_eval: bool = Field(False, description="accept a scorer that passes the model's text to Python's eval")
    seed: int = Field(0, ge=0, description="seed of the questions (not of training)")


class ColumnsSpec(Spec):
    """Which column of a data set holds what; a dot enters a nested column (`reward_model.ground_truth`)."""

    prompt: str = Field(
        default="prompt", description="the question: text, or a list of chat messages with role and content"
    )
    answer: str = Field(default="reward_model.ground_truth", description="what the scorer compares with")
    data_source: str = Field(
        default="data_source", description="what the scorer is chosen by; not read when task.scorer is set"
    )
    level: str = Field(
        default="", description="difficulty, a number or a word; empty: people for puzzles, otherwise 'all'"
    )


ScorerName = Literal["auto", "logic_rl", "exact", "exact_match", "numeric", "math"]


class DatasetSpec(Spec):
    """Questions from a file, a folder or the Hugging Face hub, in the row format of the verl family of trainers."""

    kind: Literal["dataset"] = "dataset"
    path: str = Field(
        "", description=".parquet, .jsonl or .json-lines file, a folder of them, or a Hugging Face data set's id"
    )
    source: Literal["auto", "files", "huggingface"] = Field(
        "auto", description="auto: files where the path exists, the hub for owner/name, an error otherwise"
    )
    subset: str = Field("", description="Hugging Face: configuration name")
    hub_split: str = Field("train", description="Hugging Face: split to read")
    columns: ColumnsSpec = Field(ColumnsSpec(), description="column mapping")
    scorer: ScorerName = Field("auto", description="auto: by the row's data_source; otherwise one scorer for every row")
    template: Template = Field(
        "", description="text around the question, with {prompt} in it; empty: the question as it is"
    )
    heldout_fraction: float = Field(
        0.1, ge=0, lt=1, description="share of contents held out, chosen by content hash; 0: none"
    )
    heldout_path: str = Field("", description="file, folder or id of the held-out set; then nothing is split off")
    limit: int = Field(0, ge=0, description="read at most this many rows of each set; 0: all")


class CustomSpec(Spec):
    """A task of one's own, written in Python."""

    kind: Literal["custom"] = "custom"
    factory: str = Field("", description="a name given to register_task, or module:function")
    options: dict[str, Any] = Field({}, description="keywords for the factory")


Hops = Annotated[int, Field(ge=1, le=3)]


_OF_THE_WORLD = ("hops", "unseen_hops", "train_size", "heldout_size", "unseen_size", "things", "seed")


class ToolQaSpec(Spec):
    """Questions that need a search, in Search-R1's protocol: generated ones, or a data set with a corpus."""

    kind: Literal["tool_qa"] = "tool_qa"
    hops: Annotated[tuple[Hops, ...], AfterValidator(_distinct)] = Field(
        (1,), min_length=1, description="facts to chain in train and heldout, 1 to 3"
    )
    unseen_hops: Annotated[tuple[Hops, ...], AfterValidator(_distinct)] = Field(
        (), description="numbers of facts that training never chains (split `unseen`), 1 to 3"
    )
    train_size: int = Field(300, ge=1, le=1_000_000, description="training questions for each number of hops")
    heldout_size: int = Field(
        100, ge=0, le=1_000_000, description="held-out questions for each number of hops; 0: none"
    )
    unseen_size: int = Field(50, ge=0, le=1_000_000, description="questions for each unseen number of hops")
    things: int = Field(
        300, ge=20, le=100_000, description="people, companies, cities and countries of the generated world"
    )
    questions: DatasetSpec | None = Field(
        None,
        description="a data set of questions instead of generated ones; its scorer: auto = exact_match",
    )
    corpus: str = Field(
        "", description=".jsonl or .parquet file of passages (title and text, or contents); empty: the world"
    )
    retriever_url: str = Field("", description="retrieval server of Search-R1's form, instead of BM25 over the corpus")
    top: int = Field(3, ge=1, le=100, description="passages returned for a search")
    turns: int = Field(4, ge=1, le=100, description="most replies of the environment: searches and feedback together")
    time_limit: float = Field(10.0, gt=0, le=600, description="most time for one request to the server [s]")
    retries: int = Field(3, ge=0, le=20, description="requests repeated after the first fails")
    reward: Literal["exact_match", "format"] = Field("exact_match", description="1 or 0, or Search-R1's format variant")
    style: Literal["compact", "search_r1"] = Field(
        "compact", description="prompt: the question alone, or within Search-R1's instruction"
    )
    seed: int = Field(0, ge=0, description="seed of world and questions (not of training)")

    @model_validator(mode="after")
    def _apart(self) -> ToolQaSpec:
        both = set(self.hops) & set(self.unseen_hops)
        if both:
            raise ValueError(f"unseen_hops: {sorted(both)} also stand in hops; a number is either seen or unseen")
        return self

    @model_validator(mode="after")
    def _all_used(self) -> ToolQaSpec:
        """Nothing is set that would do nothing. A default may always stand there: a run's stored configuration names all fields."""
        if self.corpus and self.retriever_url:
            raise ValueError(
                f"corpus = {self.corpus!r}: the retrieval server is searched, not the corpus; leave out corpus or retriever_url"
            )
        if self.questions is None:
            if self.corpus:
                raise ValueError(
                    f"corpus = {self.corpus!r}: holds no answers to questions about the generated world; give questions as "
                    "well, or leave out corpus"
                )
            return self
        for name in _OF_THE_WORLD:
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} = {value}: only shapes generated questions, and questions are given; leave it out"
                )
        if self.questions.scorer == "logic_rl":
            raise ValueError(
                "questions.scorer = logic_rl: judges puzzles, not answers to searches; use exact_match, exact, numeric or math"
            )
        return self


TaskSpec = Annotated[
    KnightsKnavesSpec | MathSpec | ToolQaSpec | GymSpec | DatasetSpec | CustomSpec, Field(discriminator="kind")
]
"""Configuration of any task, told apart by its field `kind`."""
