"""A step's tokens in chunks, which scans compute side by side: none goes beyond its row, or beyond a token after which
a state is kept."""

from __future__ import annotations

import numpy as np
import torch

from engine.interfaces.model import StateBatch


class Chunks:
    """The chunks of one step, c of them, of L tokens at most.

    Args:
        batch: of the step.
        size: tokens of a chunk, at most.

    Attributes:
        tokens: int64 [c * L]; which token of the step stands there; those that pad a chunk are one behind the last.
        length: L.
        places: int64 [T]; where each token stands among `tokens`.
        kept: int64 [m]; the chunks that end with `batch.write_at`.
        turns: for each turn the rows and the chunks that follow one another in them, int64 [n] each: a chunk's turn
            comes when that of the chunk before it in its row is over.
    """

    def __init__(self, batch: StateBatch, size: int) -> None:
        loc, device = batch.query_start_loc_host.astype(np.int64), batch.write_at.device
        total, num_rows = int(loc[-1]), len(loc) - 1
        wanted = np.unique(np.concatenate([batch.write_at_host.astype(np.int64) + 1, loc[1:]]))
        starts = np.concatenate([[0], wanted[:-1]])
        pieces = -(-(wanted - starts) // size)
        within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        begins = np.repeat(starts, pieces) + within * size
        ends = np.minimum(begins + size, np.repeat(wanted, pieces))
        self.length = int((ends - begins).max())
        token = begins[:, None] + np.arange(self.length)
        padded = token >= ends[:, None]
        places = np.empty(total, np.int64)
        places[token[~padded]] = np.flatnonzero(~padded.reshape(-1))
        row = np.searchsorted(loc, begins, side="right") - 1
        nth = np.arange(len(row)) - np.searchsorted(row, np.arange(num_rows))[row]
        self.tokens = torch.from_numpy(np.where(padded, total, token).reshape(-1)).to(device)
        self.places = torch.from_numpy(places).to(device)
        self.kept = torch.from_numpy(np.searchsorted(ends, batch.write_at_host + 1)).to(device)
        self.turns = [
            (torch.from_numpy(row[chunks]).to(device), torch.from_numpy(chunks).to(device))
            for chunks in (np.flatnonzero(nth == turn) for turn in range(int(nth.max()) + 1))
        ]

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, ...] -> [c, L, ...], with zeros where chunks are padded."""
        padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return padded.index_select(0, self.tokens).unflatten(0, (-1, self.length))

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """x [c, L, ...] -> [T, ...]."""
        return x.flatten(0, 1).index_select(0, self.places)

    def scan(self, before: torch.Tensor, decay: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """state -> decay * state + added, chunk after chunk of each row.

        before [R, *shape]; decay, which broadcasts to added, and added [c, *shape].

        Returns the states (before each chunk, after each chunk), [c, *shape] both.
        """
        states, starts, ends = before.clone(), torch.empty_like(added), torch.empty_like(added)
        for rows, chunks in self.turns:
            state = states.index_select(0, rows)
            starts.index_copy_(0, chunks, state)
            state = state * decay.index_select(0, chunks) + added.index_select(0, chunks)
            ends.index_copy_(0, chunks, state)
            states.index_copy_(0, rows, state)
        return starts, ends
