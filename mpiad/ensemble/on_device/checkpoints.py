"""The way over rounds of which only some states were kept: those between are computed again, stretch by stretch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.on_device.rates import parameters_of, rates_of
from mpiad.ensemble.on_device.record import Block, Record, Round
from mpiad.ensemble.on_device.stages import Stages, polynomials, states_at

__all__ = ["backwards", "forwards"]


def forwards(record: Record, block: Block) -> Iterator[Round]:
    """Return the rounds of a block with their states, from the first to the last."""
    for begin in _starts(record, block):
        yield from _stretch(record, block, begin)


def backwards(record: Record, block: Block) -> Iterator[Round]:
    """Return the rounds of a block with their states, from the last to the first."""
    for begin in reversed(_starts(record, block)):
        yield from reversed(_stretch(record, block, begin))


def _starts(record: Record, block: Block) -> range:
    count = len(block.rounds)
    return range(0, count, record.every or max(1, count))


def _stretch(record: Record, block: Block, begin: int) -> list[Round]:
    """Return the rounds from one kept state to the next, each with its states."""
    rounds = block.rounds[begin : begin + (record.every or len(block.rounds))]
    done, u = rounds[:1], rounds[0].u
    if record.every is None:
        return rounds
    for before, current in zip(rounds, rounds[1:]):
        u = _advanced(record, block, before, u)
        done.append(current._replace(u=u))
    return done


def _advanced(record: Record, block: Block, done: Round, u: Array) -> Array:
    """Return the states after a round, computed as the solve did."""
    batch, table, sign = record.batch, record.table, block.sign
    rates, p = rates_of(batch.f, batch.shape), parameters_of(batch, block.leaves)
    k = rates.at(u, p, table.time(0, done.t, done.t, done.t, sign))
    if sign is not None:
        k = k * sign.astype(table.real)
    stages = Stages(table, rates, u, k, p, done.t, done.h, done.t_new, sign)
    new = np.where(done.accepted, stages.new, u)
    for met in done.met:
        if met.terminal:
            c = met.columns
            terms = polynomials(table, u[:, c], stages.h[c], np.take(stages.k, c, axis=-1))
            new[:, c] = states_at(terms, met.x.astype(table.real))
    return new
