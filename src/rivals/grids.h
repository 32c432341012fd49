// The quantisation grids of the rivals: each function replaces numbers by what a decoder would give back.
#pragma once

#include <span>
#include <vector>

namespace oscar::rival {

// Nearest binary16, as metadata is stored; magnitudes beyond 65504 become 65504.
float round_half(float x);

// x^ = lo + step * code, code in 0 .. 2^bits - 1; lo = min x and step = (max x - min x) / (2^bits - 1) in binary16, rounded
// before codes are chosen.
void min_max(std::span<float> x, int bits);
// The same over each run of `group` values; the last one may be shorter.
void min_max_groups(std::span<float> x, int group, int bits);
// x^ = step * (code - zero), zero = round(-min / step) a whole number; min and max are shrunk by `clip` first. step in
// binary16.
void min_max_zero_point(std::span<float> x, int bits, float clip);

// llama.cpp's blocks of 32 values. q8_0: x^ = d q, d = max|x| / 127. q4_0: x^ = d (q - 8), d = (x of largest |x|) / -8.
// q4_1: x^ = d q + min, d = (max - min) / 15. Codes are chosen with d in binary32, decoded with d in binary16.
inline constexpr int kBlock = 32;
void q8_0(std::span<float> block);
void q4_0(std::span<float> block);
void q4_1(std::span<float> block);

// OCP FP8 E4M3 (bias 7, no infinity, largest 448), ties to even, saturating.
float e4m3(float x);

// Levels of the best quantiser of a unit Gaussian (Lloyd 1982, Max 1960), 1 to 4 bits, ascending.
std::vector<float> lloyd_max(int bits);
// The nearest of ascending levels.
float nearest(std::span<const float> levels, float x);

}  // namespace oscar::rival
