"""Every method's loss from its published equation, token by token; what depends on the current log-probabilities is a tensor of
one number, the rest are Python floats. Nothing here knows the method grammar: each method is its own few lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def number(x: float | Tensor) -> Tensor:
    """In float64; a tensor keeps its graph."""
    return torch.as_tensor(x, dtype=torch.float64)


def minimum(a: Tensor, b: Tensor) -> Tensor:
    return a if a.item() <= b.item() else b


def clip(x: Tensor, low: float, high: float) -> Tensor:
    if x.item() < low:
        return number(low)
    return number(high) if x.item() > high else x


Rows = Sequence[Sequence[float]]


@dataclass
class Batch:
    """One step as nested lists; `now` is the current policy's log-probability, a tensor for each token."""

    reward: list[float]
    group: list[int]
    mask: list[list[bool]]
    behavior: Rows = ()
    sampler: Rows = ()
    old: Rows = ()
    logit: Rows = ()
    entropy: Rows = ()
    polarity: Rows = ()
    collision: Rows = ()
    reference: Rows = ()
    proxy: Rows = ()  # under the filtered policy, −inf where it leaves a token out
    curvature: Sequence[Rows] = ()  # m_H and m_F
    proximal: Rows = ()  # under the averaged policy
    effect: Rows = ()  # on an outcome of the update
    now: Sequence[Sequence[Tensor]] = ()
    limit: int = 0
    beta: float = 0.0
    progress: float = 0.0
    parts: dict[str, list[float]] = field(default_factory=dict)  # of the reward
    # which of n candidates Clip-Cov draws, at most k
    choose: Callable[[int, int], list[int]] | None = None

    def tokens(self):
        return [(i, t) for i, row in enumerate(self.mask) for t, on in enumerate(row) if on]

    def row(self, i):
        return [t for t, on in enumerate(self.mask[i]) if on]


def advantages(b: Batch, divide: bool = True) -> list[float]:
    out = []
    for i, g in enumerate(b.group):
        mine = [r for r, h in zip(b.reward, b.group, strict=True) if h == g]
        if len(mine) == 1 or all(r == mine[0] for r in mine):
            out.append(0.0)
            continue
        mean = sum(mine) / len(mine)
        std = math.sqrt(sum((r - mean) ** 2 for r in mine) / (len(mine) - 1))
        out.append((b.reward[i] - mean) / (std + 1e-4) if divide else b.reward[i] - mean)
    return out


def percentile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    place = (len(ordered) - 1) * q
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def mass_percentile(values: list[float], mass: list[float], q: float) -> float:
    """The smallest value that, with all not above it, has at least the share q of the mass."""
    for value in sorted(values):
        if sum(m for v, m in zip(values, mass, strict=True) if v <= value) >= q * sum(mass):
            return value
    raise AssertionError("no mass")


def gradient_masses(b: Batch) -> dict:
    """|A|·coefficient·‖p − e_y‖ of each token, for GRPO's mean over a completion's tokens."""
    adv = advantages(b)
    return {
        (i, t): abs(adv[i])
        * coefficient(b, "sequence", i)
        * math.sqrt(1 - 2 * math.exp(b.old[i][t]) + b.collision[i][t])
        for i, t in b.tokens()
    }


def sg_weight(u: float, tau: float, u0: float) -> float:
    return min(1.4, max(1.0, 2.0 * (1 / (1 + math.exp(-(u - u0) / tau)) - 0.25)))


def calibrated(us: list[float], mass: list[float]) -> tuple[float, float]:
    """tau and u0 that put the 10th and 90th percentile over the gradient on L = 1 and U = 1.4."""
    low, high = mass_percentile(us, mass, 0.1), mass_percentile(us, mass, 0.9)
    a, b = math.log(0.75 / 0.25), math.log(0.95 / 0.05)
    tau = (high - low) / (b - a)
    return tau, low - a * tau


def covariances(b: Batch) -> dict:
    """(ln π − mean)(A − mean) over all loss tokens."""
    adv = advantages(b)
    where = b.tokens()
    mean_p = sum(b.old[i][t] for i, t in where) / len(where)
    mean_a = sum(adv[i] for i, _ in where) / len(where)
    return {(i, t): (b.old[i][t] - mean_p) * (adv[i] - mean_a) for i, t in where}


def k3(b: Batch, i: int, t: int) -> Tensor:
    d = b.reference[i][t] - b.now[i][t]
    return d.exp() - d - 1.0


def coefficient(b: Batch, how: str, i: int) -> float:
    n = len(b.mask)
    if how == "sequence":
        return 1 / (n * len(b.row(i)))
    if how == "token":
        return 1 / len(b.tokens())
    if how == "sequence_sum":
        return 1 / n
    return 1 / (n * b.limit)


def ppo(r: Tensor, a: float, low: float = 0.2, high: float = 0.2) -> Tensor:
    return minimum(r * a, clip(r, 1 - low, 1 + high) * a)


def total(b: Batch, objective, how: str = "sequence", only=None, kl_weight=None) -> Tensor:
    """−Σ coefficient·objective(i, t) + β·Σ coefficient·[w]·k3 over the loss tokens (of `only`)."""
    loss = number(0.0)
    for i, t in b.tokens():
        if only is not None and (i, t) not in only:
            continue
        c = coefficient(b, how, i)
        loss = loss - c * number(objective(i, t))
        if b.beta:
            loss = loss + c * b.beta * (1.0 if kl_weight is None else kl_weight[i, t]) * k3(b, i, t)
    return loss


def ratio(b: Batch, i: int, t: int) -> Tensor:
    return (b.now[i][t] - b.behavior[i][t]).exp()


def clipped(
    b: Batch,
    how: str = "sequence",
    *,
    adv=None,
    weight=None,
    only=None,
    low=0.2,
    high=0.2,
    bound=math.inf,
) -> Tensor:
    """[w·]min(r·A, clip(r)·A), at least bound·A where A < 0, with one advantage for each completion (list) or token (dict)."""
    adv = advantages(b) if adv is None else adv

    def objective(i, t):
        a = adv[i, t] if isinstance(adv, dict) else adv[i]
        plain = ppo(ratio(b, i, t), a, low, high)
        value = plain if a >= 0 or plain.item() > bound * a else number(bound * a)
        return value if weight is None else weight[i, t] * value

    return total(b, objective, how, only)


def ar_weight(b: Batch, alpha: float) -> dict:
    return {(i, t): alpha * math.exp(b.old[i][t]) + 1 - alpha for i, t in b.tokens()}


def lopti_tokens(b: Batch, eta: float, second: bool) -> set:
    return {(i, t) for i, t in b.tokens() if (math.exp(b.old[i][t]) < eta) != second}


def grpo(b: Batch) -> Tensor:
    return clipped(b)


def sg_weights(b: Batch, preset: str) -> dict:
    mass = gradient_masses(b)
    tau, u0 = (9.0, 0.0)
    if preset != "paper":
        tau, u0 = calibrated([b.logit[i][t] for i, t in b.tokens()], [mass[k] for k in b.tokens()])
    return {(i, t): sg_weight(b.logit[i][t], tau, u0) for i, t in b.tokens()}


def tr_grpo(b: Batch, preset: str = "calibrated") -> Tensor:
    w, adv = sg_weights(b, preset), advantages(b)
    return total(b, lambda i, t: ppo(w[i, t] * ratio(b, i, t), adv[i]), kl_weight=w)


def gaussian(values: dict) -> dict:
    mean = sum(values.values()) / len(values)
    variance = sum((x - mean) ** 2 for x in values.values()) / len(values)
    return {
        k: math.exp(-((x - mean) ** 2) / (2 * variance)) if variance else 1.0
        for k, x in values.items()
    }


def covariance_weights(b: Batch) -> dict:
    """w = exp(−c²/(2σ²)), times the tokens of the group over their sum of w."""
    c = covariances(b)
    mean = sum(c.values()) / len(c)
    variance = sum((x - mean) ** 2 for x in c.values()) / len(c)
    w = {k: math.exp(-(x**2) / (2 * variance)) if variance else 1.0 for k, x in c.items()}
    weight = {}
    for i, t in c:
        mine = [w[k] for k in c if b.group[k[0]] == b.group[i]]
        weight[i, t] = w[i, t] * len(mine) / sum(mine)
    return weight


def cov_grpo_completion(b: Batch) -> Tensor:
    """Standardized ln π of the completion: c is that, times and plus what is the same for all tokens of a completion."""
    weight: dict = {}
    for i in range(len(b.mask)):
        weight |= gaussian({(i, t): b.old[i][t] for t in b.row(i)}) if b.row(i) else {}
    return clipped(b, weight=weight)


def stapo(b: Batch, probability: float, quantile: float) -> Tensor:
    adv = advantages(b)
    rare = [k for k in b.tokens() if adv[k[0]] > 0 and math.exp(b.old[k[0]][k[1]]) < probability]
    threshold = percentile([b.entropy[i][t] for i, t in rare], quantile) if rare else 0.0
    keep = {(i, t): (i, t) not in rare or b.entropy[i][t] >= threshold for i, t in b.tokens()}
    return kept_loss(b, lambda i, t: ppo(ratio(b, i, t), adv[i], 0.2, 0.28), keep)


def ppo_ewma(b: Batch, weight=None) -> Tensor:
    """[w·](π_prox/π_old)·min(r·A, clip(r)·A) with r = π/π_prox."""
    adv = advantages(b)

    def objective(i, t):
        r = (b.now[i][t] - b.proximal[i][t]).exp()
        value = math.exp(b.proximal[i][t] - b.behavior[i][t]) * ppo(r, adv[i])
        return value if weight is None else weight[i, t] * value

    return total(b, objective)


def grpo_flat(b: Batch, strength: float) -> Tensor:
    where, mass = b.tokens(), gradient_masses(b)
    size = math.sqrt(sum(b.effect[i][t] ** 2 for i, t in where) / len(where))
    w = {(i, t): 1 - strength * math.tanh(b.effect[i][t] / size) for i, t in where}
    mean = sum(mass[k] * w[k] for k in where) / sum(mass.values())
    return clipped(b, weight={k: w[k] / mean for k in where})


def mipu(b: Batch, bound: float) -> Tensor:
    adv = advantages(b)

    def objective(i, t):
        plain = ppo(ratio(b, i, t), adv[i])
        if adv[i] < 0 and plain.item() < bound * adv[i]:
            plain = number(bound * adv[i])
        return min(math.exp(b.behavior[i][t] - b.sampler[i][t]), 2.0) * plain

    return total(b, objective)


def fiberpo(b: Batch, low: float, high: float, eps: float) -> Tensor:
    """Definition 3.1 of arXiv 2604.03044: gates of both signs of a completion's drift, and log-clips of the residuals."""

    def gate(x: Tensor, c: float, n: int) -> Tensor:
        if x.item() <= c:
            return x
        return (n + 1) * c - n * x if x.item() < (1 + 1 / n) * c else number(0.0)

    def logclip(x: Tensor) -> Tensor:
        return clip(x.log(), -eps, eps).exp()

    adv = advantages(b)

    def objective(i, t):
        row = b.row(i)
        r = {k: ratio(b, i, k) for k in row}
        zero = number(0.0)
        up = sum((r[k].log() if r[k].item() > 1 else zero) for k in row) / len(row)
        down = sum((-r[k].log() if r[k].item() < 1 else zero) for k in row) / len(row)
        base = gate(up, high, len(row)).exp() / gate(down, low, len(row)).exp()
        sign = 1 if r[t].item() >= 1 else -1
        same, other = (up.exp(), down.exp()) if sign > 0 else (down.exp(), up.exp())
        return base * logclip(same ** (-sign) * r[t]) / logclip(other ** (-sign)) * adv[i]

    return total(b, objective)


def lp_reg(b: Batch, share: float) -> Tensor:
    """The authors' loss: on the chosen tokens −r·A + k3(π, q) without a clip."""
    adv = advantages(b)
    negative = sorted((b.old[i][t], i, t) for i, t in b.tokens() if adv[i] < 0)
    chosen = {(i, t) for _, i, t in negative[: max(int(share * len(negative)), 1)]}

    def objective(i, t):
        r = ratio(b, i, t)
        if (i, t) in chosen and b.now[i][t].item() < b.proxy[i][t]:
            d = b.proxy[i][t] - b.now[i][t]
            return r * adv[i] - (d.exp() - d - 1.0)
        return ppo(r, adv[i], 1.0, 9.0)

    return total(b, objective, how="token")


def clip_cov(b: Batch, share: float, low: float, high: float) -> Tensor:
    c, adv = covariances(b), advantages(b)
    candidates = [k for k in b.tokens() if low < c[k] < high]
    drawn = {candidates[j] for j in b.choose(len(candidates), max(int(share * len(b.tokens())), 1))}
    return total(b, lambda i, t: 0.0 if (i, t) in drawn else ppo(ratio(b, i, t), adv[i], 1.0, 1.0))


def kl_cov(b: Batch, share: float) -> Tensor:
    c, adv = covariances(b), advantages(b)
    count = max(int(share * len(b.tokens())), 1)
    last = sorted(c.values(), reverse=True)[count - 1]
    penalised = {k for k, x in c.items() if x >= last}
    return total(
        b,
        lambda i, t: (
            ratio(b, i, t) * adv[i]
            - ((b.now[i][t] - b.behavior[i][t]).abs() if (i, t) in penalised else 0.0)
        ),
    )


def sequence_ratio(b: Batch, i: int) -> Tensor:
    return sum((b.now[i][t] - b.behavior[i][t]) * (1 / len(b.row(i))) for t in b.row(i)).exp()


def by_completion(
    b: Batch, objective: Callable[[int, float], Tensor], how: str = "sequence"
) -> Tensor:
    """−(1/N) Σ_i objective(i, A_i): one term a completion, not a token; KL as everywhere."""
    adv, loss = advantages(b), total(b, lambda i, t: 0.0, how=how)
    for i in range(len(b.mask)):
        if b.row(i):
            loss = loss - (1 / len(b.mask)) * objective(i, adv[i])
    return loss


def gspo(b: Batch) -> Tensor:
    return by_completion(b, lambda i, a: ppo(sequence_ratio(b, i), a, 3e-4, 4e-4))


def holder_ratio(b: Batch, i: int, p: float) -> Tensor:
    if p == 0:
        return sequence_ratio(b, i)
    return sum(
        (p * (b.now[i][t] - b.behavior[i][t])).exp() * (1 / len(b.row(i))) for t in b.row(i)
    ) ** (1 / p)


def holder(b: Batch) -> Tensor:
    return by_completion(b, lambda i, a: ppo(holder_ratio(b, i, 2.0 - 4.0 * b.progress), a))


def cispo(b: Batch) -> Tensor:
    adv = advantages(b)
    return total(
        b, lambda i, t: min(ratio(b, i, t).item(), 5.0) * adv[i] * b.now[i][t], how="token"
    )


def sapo(b: Batch) -> Tensor:
    adv = advantages(b)

    def objective(i, t):
        tau = 1.0 if adv[i] > 0 else 1.05
        return (4 / tau) * adv[i] * ((-tau * (ratio(b, i, t) - 1.0)).exp() + 1.0) ** -1.0

    return total(b, objective)


def gmpo(b: Batch) -> Tensor:
    """Ratios bounded as numbers, then Π^(1/n)."""

    def objective(i, a):
        low, high = (0.0, math.exp(0.4)) if a > 0 else (math.exp(-0.4), math.inf)
        bounded = [clip(ratio(b, i, t), low, high) for t in b.row(i)]
        return a * math.prod(bounded) ** (1 / len(bounded))

    return by_completion(b, objective)


def dppo(b: Batch, kl: bool, limit: float) -> Tensor:
    adv = advantages(b)

    def objective(i, t):
        p, q = math.exp(b.now[i][t].item()), math.exp(b.behavior[i][t])
        away = adv[i] * (p - q) > 0
        if kl and p >= 1 and q < 1:
            distance = math.inf
        else:
            rest = (1 - q) * math.log((1 - q) / (1 - p)) if kl and q < 1 else 0.0
            distance = q * math.log(q / p) + rest if kl else abs(p - q)
        return 0.0 if away and distance > limit else min(p / q, 20.0) * adv[i] * b.now[i][t]

    return total(b, objective)


def luspo(b: Batch) -> Tensor:
    """(1/N) Σ_i |o_i|·min(s A, clip(s) A); the KL term summed over a completion as well."""
    return by_completion(
        b, lambda i, a: len(b.row(i)) * ppo(sequence_ratio(b, i), a, 2e-3, 2.5e-3), "sequence_sum"
    )


def vespo(b: Batch, factor: Callable[[int, int], float] = lambda i, t: 1.0) -> Tensor:
    adv, phi = advantages(b), {}
    for i in range(len(b.mask)):
        w = 1.0
        for t in b.row(i):
            w *= math.exp(b.now[i][t].item() - b.behavior[i][t]) * max(factor(i, t), 1e-8)
        w = max(w, 1e-8)
        k, rate = (2.0, 3.0) if adv[i] >= 0 else (3.0, 2.0)
        phi[i] = math.exp(rate) * w**k * math.exp(-rate * w)
    return total(b, lambda i, t: phi[i] * adv[i] * b.now[i][t], how="token")


def papo(b: Batch, target: float) -> Tensor:
    adv = advantages(b)
    mean = sum(b.entropy[i][t] for i, t in b.tokens()) / len(b.tokens())
    phase = max(-1.0, min(1.0, (target - mean) / target))
    weight = {}
    for i, t in b.tokens():
        change = -adv[i] * b.polarity[i][t]
        weight[i, t] = 1 + 0.5 * phase * ((change > 0) - (change < 0))
    return clipped(b, weight=weight)


def high_entropy(b: Batch) -> Tensor:
    adv = advantages(b)
    ordered = sorted((b.entropy[i][t] for i, t in b.tokens()), reverse=True)
    last = ordered[math.ceil(0.2 * len(ordered)) - 1]
    return total(b, lambda i, t: ppo(ratio(b, i, t), adv[i]) if b.entropy[i][t] >= last else 0.0)


def members(b: Batch, i: int) -> list[int]:
    return [j for j, g in enumerate(b.group) if g == b.group[i]]


def equal_rewards(b: Batch, i: int, reward: list[float] | None = None) -> bool:
    values = b.reward if reward is None else reward
    return len({values[j] for j in members(b, i)}) == 1


def deviation(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1))


def batch_scaled(b: Batch) -> list[float]:
    return [a / (deviation(b.reward) + 1e-4) for a in advantages(b, divide=False)]


def leave_one_out(b: Batch) -> list[float]:
    out = []
    for i in range(len(b.reward)):
        others = [b.reward[j] for j in members(b, i) if j != i]
        out.append(
            b.reward[i] - sum(others) / len(others) if others and not equal_rewards(b, i) else 0.0
        )
    return out


def whitened(b: Batch, baseline: bool) -> dict:
    start = advantages(b, divide=False) if baseline else b.reward
    returns = {(i, t): start[i] for i, t in b.tokens()}
    mean = sum(returns.values()) / len(returns)
    variance = sum((x - mean) ** 2 for x in returns.values()) / (len(returns) - 1)
    return {k: (x - mean) / math.sqrt(variance + 1e-8) for k, x in returns.items()}


def length_baseline(b: Batch) -> list[float]:
    out = []
    for i in range(len(b.reward)):
        tokens = [(b.reward[j], len(b.row(j))) for j in members(b, i)]
        baseline = sum(r * n for r, n in tokens) / sum(n for _, n in tokens)
        out.append(0.0 if equal_rewards(b, i) else b.reward[i] - baseline)
    return out


def token_baseline(b: Batch, tail: str = "reward") -> dict:
    def energy(j: int, k: int) -> float:
        """Of the first k + 1 loss tokens of completion j."""
        return sum(1 - 2 * math.exp(b.old[j][t]) + b.collision[j][t] for t in b.row(j)[: k + 1])

    out = {}
    for i in range(len(b.reward)):
        for k, t in enumerate(b.row(i)):
            present = [j for j in members(b, i) if len(b.row(j)) > k]
            if present == [i]:
                out[i, t] = b.reward[i] if tail == "reward" else 0.0
            elif equal_rewards(b, i):
                out[i, t] = 0.0
            else:
                top = sum(b.reward[j] * energy(j, k) for j in present)
                out[i, t] = b.reward[i] - top / (sum(energy(j, k) for j in present) + 1e-8)
    return out


def decoupled(b: Batch, weights: dict[str, float]) -> list[float]:
    total = []
    for i in range(len(b.reward)):
        total.append(0.0)
        for name, weight in weights.items():
            mine = [b.parts[name][j] for j in members(b, i)]
            if len(set(mine)) > 1:
                total[i] += (
                    weight * (b.parts[name][i] - sum(mine) / len(mine)) / (deviation(mine) + 1e-4)
                )
    mean, std = sum(total) / len(total), deviation(total)
    flat = [all(equal_rewards(b, i, b.parts[name]) for name in weights) for i in range(len(total))]
    return [0.0 if f else (x - mean) / (std + 1e-4) for x, f in zip(total, flat, strict=True)]


def mean_scaled(b: Batch, values: list[float] | None = None) -> list[float]:
    values, out = b.reward if values is None else values, []
    for i in range(len(values)):
        mine = [values[j] for j in members(b, i)]
        mean = sum(mine) / len(mine)
        out.append(
            (values[i] - mean) / mean if mean > 0 and not equal_rewards(b, i, values) else 0.0
        )
    return out


def maxrl(b: Batch) -> Tensor:
    """Answers with a reward above the lower median are correct."""
    middle = sorted(b.reward)[(len(b.reward) - 1) // 2]
    return clipped(b, "token", adv=mean_scaled(b, [float(r > middle) for r in b.reward]))


# -- 2026 --------------------------------------------------------------------------------------------------------------


def kept_loss(b: Batch, objective, keep: dict, how: str = "token") -> Tensor:
    """−Σ objective over the kept tokens / their number (or mean by completion first), + β·Σ k3 over all tokens / the same."""
    loss, rows = number(0.0), len(b.mask)
    for i, t in b.tokens():
        count = sum(keep[i, s] for s in b.row(i)) if how == "sequence" else sum(keep.values())
        c = 1 / max(count, 1) / (rows if how == "sequence" else 1)
        if keep[i, t]:
            loss = loss - c * number(objective(i, t))
        if b.beta:
            loss = loss + c * b.beta * k3(b, i, t)
    return loss


def wapo(b: Batch) -> Tensor:
    """Groups with a positive completion: Σ over them of min(π/μ, 10)·A / (completions · limit), mean over such groups."""
    adv = advantages(b, divide=False)
    groups = {g for g, a in zip(b.group, adv, strict=True) if a > 0}
    loss = number(0.0)
    for i, t in b.tokens():
        c = 1 / (b.group.count(b.group[i]) * b.limit * max(len(groups), 1))
        r = (b.now[i][t] - b.sampler[i][t]).exp()
        loss = loss - c * (minimum(r, number(10.0)) * max(adv[i], 0.0) - b.beta * k3(b, i, t))
    return loss


def delight(b: Batch) -> Tensor:
    adv = advantages(b, divide=False)
    return total(
        b,
        lambda i, t: adv[i] / (1 + math.exp(adv[i] * b.now[i][t].item())) * b.now[i][t],
        how="token",
    )


def stare(b: Batch, share: float, high: float, low: float, target: float) -> Tensor:
    adv, weight = advantages(b), dict.fromkeys(b.tokens(), 1.0)
    if sum(b.entropy[i][t] for i, t in weight) / len(weight) < target:
        for sign, value in ((1, high), (-1, low)):
            ranked = sorted((b.old[i][t], i, t) for i, t in weight if sign * adv[i] > 0)
            for _, i, t in ranked[: max(math.ceil(share * len(ranked) - 1e-9), 1)]:
                weight[i, t] = value
    return clipped(b, "token", weight=weight, bound=3.0)


def rsi_s(b: Batch) -> Tensor:
    adv = advantages(b)
    keep = {(i, t): 0.5 <= -b.old[i][t] / (b.entropy[i][t] + 1e-8) <= 2.0 for i, t in b.tokens()}
    return kept_loss(b, lambda i, t: ppo(ratio(b, i, t), adv[i]), keep)


def pepo_weights(b: Batch, window: int) -> dict:
    adv, weight = advantages(b), dict.fromkeys(b.tokens(), 1.0)
    for i in range(len(b.mask)):
        h = [math.exp(b.entropy[i][t]) for t in b.row(i)]
        e = [x / sum(h[max(0, k - window // 2) : k + window // 2 + 1]) for k, x in enumerate(h)]
        if adv[i] > 0:
            weight |= {(i, t): len(e) * x / sum(e) for t, x in zip(b.row(i), e, strict=True)}
    return weight


def pepo(b: Batch, window: int) -> Tensor:
    return clipped(b, "token", weight=pepo_weights(b, window), high=0.28)


def fading(b: Batch) -> float:
    return 0.99 * (1 - min(b.progress / 0.8, 1.0))


def tp_schedule(b: Batch) -> Tensor:
    adv, keep = advantages(b), {}
    for i in range(len(b.mask)):
        left_out = min(math.floor(fading(b) * len(b.row(i)) + 1e-9), len(b.row(i)) - 1)
        keep |= {(i, t): place >= left_out for place, t in enumerate(b.row(i))}
    return kept_loss(b, lambda i, t: ppo(ratio(b, i, t), adv[i], 0.2, 0.28), keep)


def forking_schedule(b: Batch) -> Tensor:
    adv, keep = advantages(b), {}
    for i in range(len(b.mask)):
        count = math.ceil((1 - fading(b)) * len(b.row(i)) - 1e-9)
        ranked = sorted(b.row(i), key=lambda t, i=i: -b.entropy[i][t])
        keep |= {(i, t): t in ranked[:count] for t in ranked}
    return kept_loss(b, lambda i, t: ppo(ratio(b, i, t), adv[i], 0.2, 0.28), keep)


def entropy_schedule(b: Batch) -> Tensor:
    """With another advantage instead of a weight."""
    adv = advantages(b)
    shaped = {
        (i, t): adv[i] + fading(b) * min(0.4 * b.entropy[i][t], abs(adv[i]) / 2)
        for i, t in b.tokens()
    }
    return clipped(b, "token", adv=shaped, high=0.28)


def capo(
    b: Batch, objective_bound: float = 0.01, kl_bound: float = 1e-4, adv=None, clipped: bool = True
) -> Tensor:
    adv = advantages(b) if adv is None else adv
    keep = {}
    for i, t in b.tokens():
        m_h, m_f = b.curvature[i][t]
        keep[i, t] = -objective_bound < m_h < objective_bound and m_f < kl_bound

    def objective(i, t):
        return ppo(ratio(b, i, t), adv[i]) if clipped else ratio(b, i, t) * adv[i]

    return kept_loss(b, objective, keep, "sequence")


# -- ∂L/∂ln π of TRL's own loss, the slow way: its loss is run again with the log-probabilities as independent variables


def loss_coefficients(
    trainer: Any, compute_loss: Any, model: Any, inputs: dict[str, Any], logp: Tensor
) -> Tensor:
    """(n, T) gradient of `compute_loss(model, inputs)` by `logp` (n, T), which stands in for the model's own."""
    leaf = logp.detach().clone().requires_grad_()
    entropy = torch.zeros_like(leaf)
    before = trainer.__dict__.get("_get_per_token_logps_and_entropies")
    metrics = {
        mode: {k: list(v) for k, v in found.items()} for mode, found in trainer._metrics.items()
    }
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: _as_trl(trainer, leaf, entropy)
    try:
        loss = compute_loss(model, inputs)
    finally:
        if before is None:
            del trainer._get_per_token_logps_and_entropies
        else:
            trainer._get_per_token_logps_and_entropies = before
        for mode, found in metrics.items():
            trainer._metrics[mode].clear()
            trainer._metrics[mode].update(found)
    return torch.autograd.grad(loss, leaf)[0]


def _as_trl(trainer: Any, logp: Tensor, entropy: Tensor) -> tuple[Any, ...]:
    """TRL before 1.8 returns two values, later ones three (the last is a mixture-of-experts loss)."""
    return (logp, entropy, None) if hasattr(trainer, "aux_loss_enabled") else (logp, entropy)
