"""The cases by their ids: `A1` to `O10` of the contract, `R1` to `R12` for its bitwise rules."""

from __future__ import annotations

from attnplat.testing.case import Case, CaseList, by_number
from attnplat.testing.cases.a_empty import A
from attnplat.testing.cases.b_masked import B
from attnplat.testing.cases.c_poison import C
from attnplat.testing.cases.d_masks import D
from attnplat.testing.cases.e_scores import E
from attnplat.testing.cases.f_shapes import F
from attnplat.testing.cases.g_paging import G
from attnplat.testing.cases.h_quantised import H
from attnplat.testing.cases.i_latent import I
from attnplat.testing.cases.j_batches import J
from attnplat.testing.cases.k_shards import K
from attnplat.testing.cases.l_states import L
from attnplat.testing.cases.m_plans import M
from attnplat.testing.cases.n_errors import N
from attnplat.testing.cases.o_numerics import O
from attnplat.testing.cases.r_bitwise import R

KINDS: tuple[CaseList, ...] = (A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, R)

CASES: tuple[Case, ...] = tuple(case for kind in KINDS for case in by_number(kind.cases))
"""Every case, in the order of its id."""
