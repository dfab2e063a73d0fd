"""Tables for pictures against losses computed by hand at the same weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sharpscope.surface import lm_surface
from sharpscope.surface.algorithms import spectral_density
from sharpscope.surface.pictures import (
    direction,
    plane,
    random_direction,
    slices,
    spectrum_table,
    token_curvatures,
)
from sharpscope.surface.surface import moved
from tests.loops import some
from tests.models import generator, objective, random_batch, small_model


@pytest.fixture(scope="module")
def surface():
    batch = random_batch(vocab=13, rows=4, prompt=3, completion=3)
    with lm_surface(small_model(), objective("nll", batch), check="off") as found:
        yield found


def loss_at(surface, step):
    with moved(surface.parameters, step):
        return surface.value()


def test_slices_are_losses_at_distances_and_mark_what_training_crossed(surface):
    loss, gradient = surface.gradient()
    path = 0.3 * gradient / gradient.norm() + 1e-3
    along = {"gradient": direction(gradient, path), "random": random_direction(surface, 0)}
    table = slices(surface, along, reach=0.2, points=5)
    assert list(table["direction"].unique()) == ["gradient", "random"]
    for row in some(table.to_dict("records")):
        step = along[row["direction"]].unit * row["distance"]
        assert row["loss"] == pytest.approx(loss_at(surface, step), rel=1e-12)
        assert row["rise"] == pytest.approx(row["loss"] - loss, abs=1e-12) and row["prompts"] == 4
    first = table[table["direction"] == "gradient"]
    start = -float(path @ along["gradient"].unit)
    assert start < -0.2 and first["distance"].min() == pytest.approx(start)
    assert (first["trained"] == first["distance"].between(start, 0)).all() and first[
        "trained"
    ].any()
    still = table[(table["direction"] == "random") & table["trained"]]
    assert still["distance"].tolist() == [0]


def test_a_random_direction_has_the_weights_norms_row_by_row(surface):
    unit, parts = random_direction(surface, 0).unit, []
    for part, weights in zip(
        unit.split([p.numel() for p in surface.parameters]), surface.parameters, strict=True
    ):
        if weights.dim() < 2:
            assert float(part.norm()) == 0
        else:
            shape = weights.shape
            parts.append(
                part.view(shape).norm(dim=1) / weights.detach().norm(dim=1).clamp_min(1e-30)
            )
    ratios = torch.cat(parts)
    ratios = ratios[ratios > 0]
    assert len(ratios) > 10 and float(ratios.std() / ratios.mean()) < 1e-6


def test_a_plane_has_the_path_of_checkpoints_in_it(surface):
    _, gradient = surface.gradient()
    first, second = direction(gradient), random_direction(surface, 1)
    change = 0.1 * first.unit
    table = plane(surface, first, second, reach=0.1, points=3, path=[change])
    grid, path = table[table["kind"] == "grid"], table[table["kind"] == "path"]
    assert len(grid) == 9 and path["first"].tolist() == pytest.approx([-0.1, 0])
    assert path["loss"].iloc[0] == pytest.approx(loss_at(surface, -change), rel=1e-12)
    corner = grid[(grid["first"] == 0.1) & (grid["second"] == 0.1)].iloc[0]
    across = second.unit - first.unit * (first.unit @ second.unit)
    step = 0.1 * first.unit + 0.1 * across / across.norm()
    assert corner["loss"] == pytest.approx(loss_at(surface, step), rel=1e-12)


def test_a_spectrum_has_its_band(surface):
    density = spectral_density(surface.hessian(), probes=3, iterations=10, generator=generator())
    table = spectrum_table(density, surface)
    assert (table["low"] <= table["density"]).all() and (table["density"] <= table["high"]).all()
    assert np.trapezoid(table["density"], table["eigenvalue"]) == pytest.approx(1, abs=1e-3)
    assert set(table["prompts"]) == {4} and set(table["functional"]) == {"nll"}


def test_leading_tokens_have_the_curvature_along_their_gradients(surface):
    """Of all scored tokens in turn: gradients by plain autograd, curvature by a Hessian product."""
    table = token_curvatures(surface)
    batch, gradients = surface.objective.batch, {}
    count = float(batch.scored.sum())
    for row, place in batch.scored.nonzero().tolist():
        logp = surface.logp_of(torch.tensor([row]))[0, place]
        parts = torch.autograd.grad(logp, surface.parameters)
        gradients[row, place] = -torch.cat([part.flatten() for part in parts]) / count
    leading = sorted(gradients, key=lambda at: -float(gradients[at].norm()))[:8]
    assert list(zip(table["row"], table["position"], strict=True)) == leading
    hessian, norms, curved = surface.hessian(), [], []
    for at in some(leading):
        unit = gradients[at] / gradients[at].norm()
        norms.append(float(gradients[at].norm()))
        curved.append(float(unit @ (hessian @ unit)))
    assert table["norm"].tolist() == pytest.approx(norms)
    assert table["curvature"].tolist() == pytest.approx(curved) and set(table["prompts"]) == {4}
    assert table["token"].tolist() == [int(batch.input_ids[at]) for at in leading]
