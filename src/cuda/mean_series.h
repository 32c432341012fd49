// Slow pairs of the RoPE means in decode (rope_means.cuh). What they add to a logit is a polynomial over a group of eight pages
// of a series, one for every other page: T_0 .. T_7 (Chebyshev) of the token's distance from the middle of its four pages, in
// units of kReach; even ones belong to cosines, odd ones to sines. Tables, halves in the order of A fragments
// (layer_tables.cpp), with g = lane / 4, t = lane mod 4:
//   [slow pairs / 16][32 lanes][8]         coefficients of T_g: pairs 2t, 2t + 1, 2t + 8, 2t + 9 of 16, real, then imaginary
//   [4 turns of two pages][2][32 lanes][8] values: T_2t, T_2t+1 at rows g, g + 8 of a tile of 16 tokens, then of the next tile
#pragma once

#include "oscar/paged/page_format.h"

namespace oscar::cuda {

inline constexpr int kSeriesStep = paged::kPageTokens * paged::kPatterns;  // tokens between neighbours of a series
inline constexpr int kGroupPages = 8;
inline constexpr int kGroupTurns = kGroupPages / 2;  // two pages at a time, neighbours: each is one of four, of its own middle
inline constexpr int kPolynomials = 8;
// From the middle of four pages, every other one of a series, to that of one of them.
[[nodiscard]] constexpr double group_offset(int turn) { return (turn - (kGroupTurns - 1) / 2.0) * (2 * kSeriesStep); }
inline constexpr double kReach = group_offset(kGroupTurns - 1) + paged::kPageTokens / 2.0;

inline constexpr int kCoefficientHalves = 16;                                         // per slow pair
inline constexpr int kValueHalves = kGroupTurns * paged::kPageTokens * kPolynomials;  // of all turns

}  // namespace oscar::cuda
