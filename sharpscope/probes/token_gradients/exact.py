"""The tier `exact`: batched backward passes of single tokens, each on the token's prefix.

One forward pass over a batch of rows serves as many tokens as fit in memory. Cotangents are batched by `torch.func.vmap`, and
a tap on each use of a parameter turns them into squared norms, so that no gradient is stored. If the last layer allows it, the
part after the last attention is computed per position by one ordinary backward pass, since cotangents do not leave their
position there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sharpscope.errors import UserError
from sharpscope.probes.token_gradients import attention as attn
from sharpscope.probes.token_gradients.batched import each, way
from sharpscope.probes.token_gradients.head import head_gradients
from sharpscope.probes.token_gradients.local import add_head
from sharpscope.probes.token_gradients.result import Collector, Ledger, ScoreNorms
from sharpscope.probes.token_gradients.rows import Rows, safe_width, widen
from sharpscope.probes.token_gradients.shortcuts import Shortcuts
from sharpscope.probes.token_gradients.structure import Structure, hidden_states, recording, split_forward
from sharpscope.probes.token_gradients.uses import Recorder, Use, exact_squares, local_squares, squares_of

# Bytes that the widest activation's batch of cotangents may take, per thread: on a CPU it should stay in the cache.
COTANGENT_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
SLOTS = 16  # tokens of a row that share one forward pass: more save forward passes, fewer waste less of the prefix
LANES = {"cpu": 64, "cuda": 256}  # rows × slots of one forward pass
ROWS = {"cpu": 8, "cuda": 256}  # rows of one forward pass, which all get the length of the longest

Found = tuple[str, Tensor, Tensor]
"""A parameter, squared norms (m,), the tokens (m,) they belong to."""


@dataclass(frozen=True)
class Tokens:
    """M chosen tokens, row by row, and what is known of them before their backward passes.

    Attributes:
        row, position: (M,) where each is predicted.
        start: (M, d) cotangent of the hidden state there; with a split pass, of the last layer's input.
        output: (M, H, d_head) with a split pass: cotangent of the last attention's output.
        hidden, coupled: (M, d), (M, L): h and ∂ log π/∂a at the row's words, where embeddings are tied.
    """

    row: Tensor
    position: Tensor
    start: Tensor
    output: Tensor | None
    hidden: Tensor
    coupled: Tensor | None


def exact_norms(
    model: nn.Module, structure: Structure, rows: Rows, temperature: float, cotangent_bytes: int | None = None
) -> ScoreNorms:
    """Norms of all chosen tokens, exact up to rounding. The model must be in eval mode.

    Raises:
        UserError: the output layer's parameters are also used in the backbone, other than as tied input embedding.
    """
    structure.require_seen()
    way()  # found out before any `vmap` is in progress
    while True:
        for name in (structure.tied, structure.head_weight, structure.head_bias):
            if name in structure.unhandled:
                raise UserError(
                    f"tier, exact: '{name}' is the output layer's and also used in {structure.unhandled[name]}; "
                    "freeze it"
                )
        try:
            return _every_norm(model, structure, rows, temperature, cotangent_bytes)
        except _Learned:
            continue


class _Learned(Exception):  # noqa: N818 - not an error: begin again with what is known now
    """A forward pass uses a parameter in a new way."""


def _every_norm(
    model: nn.Module, structure: Structure, rows: Rows, temperature: float, cotangent_bytes: int | None
) -> ScoreNorms:
    device = rows.ids.device
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    budget = COTANGENT_BYTES.get(device.type, COTANGENT_BYTES["cuda"])
    if cotangent_bytes is not None:
        budget = cotangent_bytes // threads
    collector = Collector(rows.shape, torch.promote_types(structure.head.weight.dtype, torch.float32), device)
    for chunk in rows.chunks():
        ledger = Ledger(structure.groups, torch.zeros(len(chunk.targets), dtype=collector.dtype, device=device))
        tokens = _prepare(model, structure, chunk, temperature, ledger)
        lanes, most = (sizes.get(device.type, sizes["cuda"]) for sizes in (LANES, ROWS))
        batches = _packed(tokens, *((1, 1) if structure.unhandled else (lanes, most)))
        jobs = (_batch(model, structure, chunk, tokens, batch, budget) for batch in batches)
        for norms in in_threads(jobs, threads):
            for name, squares, places in norms:
                ledger.add(name, squares, places)
        collector.write(chunk, ledger)
    return collector.result("exact", torch.zeros_like(collector.squared))


def _prepare(model: nn.Module, structure: Structure, chunk: Rows, temperature: float, ledger: Ledger) -> Tokens:
    """One forward pass: the output layer's part and, with a split, that of everything after the last attention."""
    ids = widen(chunk.ids, safe_width(model, chunk.ids.shape[1]))  # (B, L)
    predicts = nn.functional.pad(chunk.predicts, (0, ids.shape[1] - chunk.ids.shape[1]))
    row, position = predicts.nonzero(as_tuple=True)
    recorder = structure.recorder((ids.shape[0], ids.shape[1]), whole=True)
    entered, leaf = None, None
    with torch.no_grad():
        if structure.last_layer is not None:
            hidden, entered, leaf = split_forward(model, structure, recorder, ids, structure.last_layer)
        else:
            with recording(model, structure, recorder, attn.FULL):
                hidden = hidden_states(model, ids)
    states = hidden.detach()[predicts]  # (M, d)
    words = ids[row] if structure.tied else None
    output, coupled = head_gradients(states, structure.head, chunk.targets, temperature, words=words)
    add_head(ledger, structure, output)
    start, attended = output.to_hidden, None
    if entered is not None and leaf is not None:
        if structure.learn(recorder):
            raise _Learned
        g = torch.zeros_like(hidden)
        g[predicts] = start
        into, out, *rest = torch.autograd.grad(
            hidden, [entered.x, leaf[1], *(use.out for use in recorder.uses)], g, allow_unused=True
        )
        for use, cotangent in zip(recorder.uses, rest, strict=True):
            if cotangent is not None:
                for name, squares in local_squares(use, cotangent):
                    ledger.add(name, squares[row, position])
        start = into[row, position]
        attended = out.transpose(1, 2)[row, position]  # (B, H, L, d) -> (M, H, d)
    return Tokens(row, position, start, attended, states, coupled)


def _packed(tokens: Tokens, lanes: int, most: int) -> Iterator[Tensor]:
    """Batches (n, B) of token indices, −1 where empty: B ≤ `most` rows, each with up to n of its tokens, longest first.

    n·B is at most `lanes` unless B is 1.
    """
    if not len(tokens.row):
        return
    lists: list[list[int]] = []
    order = torch.argsort(tokens.row * (int(tokens.position.max()) + 1) - tokens.position, stable=True)
    before = -1
    for index, owner in zip(order.tolist(), tokens.row[order].tolist(), strict=True):
        if owner != before or len(lists[-1]) == SLOTS:
            lists.append([])
        lists[-1].append(index)
        before = owner
    position = tokens.position.tolist()
    # Rows of a batch share its length and its number of slots: sort by both.
    lists.sort(key=lambda entry: (-position[entry[0]], -len(entry)))
    entries: list[list[int]] = []
    for entry in lists:
        slots = max(len(one) for one in (*entries, entry))
        if entries and (slots * (len(entries) + 1) > lanes or len(entries) == most):
            yield _grid(entries)
            entries = []
        entries.append(entry)
    yield _grid(entries)


def _grid(entries: list[list[int]]) -> Tensor:
    slots = max(len(entry) for entry in entries)
    return torch.tensor([[entry[i] if i < len(entry) else -1 for entry in entries] for i in range(slots)])


def _batch(
    model: nn.Module, structure: Structure, chunk: Rows, tokens: Tokens, batch: Tensor, budget: int
) -> Callable[[], list[Found]]:
    """Forward pass over a batch of rows; returns the backward passes of its tokens, which may run in another thread."""
    batch = batch.to(chunk.ids.device)
    used = batch >= 0
    index = batch.clamp_min(0)  # (n, B)
    position = torch.where(used, tokens.position[index], 0)
    length = safe_width(model, int(position.max()) + 1)
    ids = widen(chunk.ids[tokens.row[index[0]], :length], length)  # (B, L)
    taps = _Taps((ids.shape[0], ids.shape[1]))
    whole = [structure.named[name] for name in structure.unhandled]
    recorder = structure.recorder(taps.size, whole=True, wrap=taps.wrap)
    scene, outputs = _forward(model, structure, recorder, ids)
    if structure.learn(recorder):
        raise _Learned
    if not taps.probes and not whole:
        return list
    widest = max((use.out.numel() for use in taps.uses), default=1) * outputs[0].element_size()
    step = max(1, budget // max(widest, 4 * sum(p.numel() for p in whole)))

    def pull() -> list[Found]:
        """Squared norms of the batch's tokens by parameter, by one backward pass for every `step` tokens."""
        results: list[Found] = []
        for first in range(0, len(batch), step):
            part, live = index[first : first + step], used[first : first + step]  # (m, B)
            given = _cotangents(tokens, scene, taps, structure.tied, part, live, position[first : first + step])
            squares, gradients = _pull(outputs, given, taps, whole)
            flat, places = live.flatten(), part.flatten()[live.flatten()]
            for use, each_square in zip(taps.uses, squares, strict=True):
                if each_square is not None:
                    square = each_square.expand(len(part), -1, -1)  # a cotangent of 0 may come once for all tokens
                    results += [(name, square[..., i].flatten()[flat], places) for i, name in enumerate(use.names)]
            for name, g in zip(structure.unhandled, gradients, strict=True):
                whole_squares = squares_of(g.reshape(len(g), -1))
                results.append((name, whole_squares[flat], places))
        taps.release()
        return results

    return pull


def _cotangents(
    tokens: Tokens, scene: attn.Scene | None, taps: _Taps, tied: str | None, part: Tensor, live: Tensor, where: Tensor
) -> list[Tensor]:
    """What is pulled back for tokens `part` (m, B) at positions `where` (m, B), zero where not `live` (m, B).

    Tells the tied embedding's tap about these tokens too.
    """
    starts = _at(tokens.start[part] * live[..., None], where, taps.size)  # (m, B, L, d)
    if tokens.coupled is not None:
        coupled = tokens.coupled[part][..., : taps.size[1]] * live[..., None]
        coupled = nn.functional.pad(coupled, (0, taps.size[1] - coupled.shape[-1]))
        taps.tie(tied, tokens.hidden[part], coupled)
    if scene is None or tokens.output is None:
        return [starts]
    attended = tokens.output[part] * live[..., None, None]  # (m, B, H, d)
    return [*attn.pull_back_at(scene, attended, where), starts]


def _forward(
    model: nn.Module, structure: Structure, recorder: Recorder, ids: Tensor
) -> tuple[attn.Scene | None, list[Tensor]]:
    """The graph to pull back through: (last attention or None, tensors whose cotangents are given)."""
    entered: list[Tensor] = []
    split = structure.last_layer is not None
    handle = None
    if structure.last_layer is not None:

        def keep(_: nn.Module, args: tuple, kwargs: dict) -> None:
            entered.append(args[0] if args else kwargs["hidden_states"])

        handle = structure.last_layer.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        last = structure.attention_calls if split else None
        # A shortcut keeps the values that it hands out, so nothing may write to them.
        cheaper = nullcontext() if structure.in_place else Shortcuts()
        with torch.enable_grad(), cheaper, recording(model, structure, recorder, attn.FULL, last, stop=True):
            hidden = hidden_states(model, ids)
    except attn.Stopped as stopped:
        with torch.no_grad():
            scene = attn.look(stopped.call)
        return scene, [*stopped.call.inputs, entered[0]]
    finally:
        if handle is not None:
            handle.remove()
    return None, [hidden]


def _at(values: Tensor, where: Tensor, size: tuple[int, int]) -> Tensor:
    """Values (m, B, d) put at positions `where` (m, B) of zeros (m, B, L, d)."""
    out = values.new_zeros(*where.shape, size[1], values.shape[-1])
    return out.scatter_(2, where[..., None, None].expand(*where.shape, 1, values.shape[-1]), values[:, :, None])


def _pull(
    outputs: list[Tensor], given: list[Tensor], taps: _Taps, whole: list[nn.Parameter]
) -> tuple[list[Tensor | None], list[Tensor]]:
    """Batched vector-Jacobian products.

    Returns:
        Squared norms (m, B, k) at each use, None where no cotangent arrives, and whole gradients (m, *shape).
    """
    pairs = [(tensor, g) for tensor, g in zip(outputs, given, strict=True) if tensor.requires_grad]
    roots = [tensor for tensor, _ in pairs]
    taps.squares = [None] * len(taps.uses)

    def pull(*cotangents: Tensor) -> tuple[Tensor, ...]:
        """Gradients of the parameters that are formed whole; hooks at the probes take the others' squares."""
        pulled = torch.autograd.grad(roots, [*taps.probes, *whole], cotangents, retain_graph=True, allow_unused=True)
        gradients = pulled[len(taps.probes) :]
        return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(whole, gradients, strict=True))

    gradients = torch.func.vmap(pull)(*(g for _, g in pairs))
    return taps.squares, list(gradients)


class _Taps:
    """Puts a tap on the output of each use that measures its cotangents; `probes` make the outputs require grad."""

    def __init__(self, size: tuple[int, int]) -> None:
        self.uses: list[Use] = []
        self.probes: list[Tensor] = []
        self.squares: list[Tensor | None] = []  # of each use, (m, B, parameters), from the last backward pass
        self.size = size  # (B, L)

    def wrap(self, use: Use) -> Tensor:
        """A use's output, whose cotangent gives the squared norms of its parameters."""
        probe = use.out.new_zeros((), requires_grad=True)
        index = len(self.uses)
        self.uses.append(use)
        self.probes.append(probe)
        self.squares.append(None)

        def measure(g: Tensor) -> tuple[Tensor]:
            self.squares[index] = exact_squares(use, g)
            return (g.new_zeros(len(g)),)

        return _Tap.apply(use.out, probe, measure)

    def release(self) -> None:
        """Release the graph: it and the taps refer to each other, which the garbage collector does not detect."""
        for use in self.uses:
            use.tied = None
        self.uses, self.probes, self.squares = [], [], []

    def tie(self, name: str | None, hidden: Tensor, coupled: Tensor) -> None:
        """Set the tokens of the next backward pass for the tied embedding: hidden (m, B, d), coupled (m, B, L)."""
        for use in self.uses:
            if use.kind == "embedding" and use.weight == name:
                use.tied = (hidden, coupled)


class _Tap(torch.autograd.Function):
    """Identity whose backward pass also calls `measure`, which maps cotangents (n, *shape) to (n,)."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, probe: Tensor, measure: Callable[[Tensor], tuple[Tensor]]) -> Tensor:
        ctx.measure = measure
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        return g, each(g, ctx.measure)[0], None


T = TypeVar("T")


def in_threads(jobs: Iterable[Callable[[], T]], threads: int) -> Iterator[T]:
    """Run jobs in parallel threads and yield their results in order.

    Small operations gain little from several threads each; whole backward passes in parallel use all of them. So operations use
    one thread meanwhile, and `threads` again afterwards. The iterable is advanced in the calling thread, a few jobs ahead.
    """
    if threads == 1:
        for job in jobs:
            yield job()
        return
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            waiting: deque[Future[T]] = deque()
            for job in jobs:
                waiting.append(pool.submit(job))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    finally:
        torch.set_num_threads(threads)
