// Configurations of keys, and what the encoder's search for a gain comes to, in double.
#pragma once

#include "codec/spectral_rows.h"

namespace oscar::test {

inline SpectralKeyConfig config_of(std::vector<SpectralKeyHead> heads) {
  SpectralKeyConfig config;
  config.n_head_kv = static_cast<int>(heads.size());
  config.head_dim = static_cast<int>(heads.front().transform.rows());
  config.heads = std::move(heads);
  return config;
}

inline SpectralKeyConfig random_config(int heads, int dim) {
  std::vector<SpectralKeyHead> list;
  for (int h = 0; h < heads; ++h) list.push_back(random_head(dim, 100U * static_cast<unsigned>(h + dim)));
  return config_of(std::move(list));
}

inline double gain_of(int byte) { return std::pow(2.0, (byte - 128) / 16.0); }

// What coding z with one gain comes to by spectral.h, in double. Nearer than kNearEdge to the edge between two codes, binary32
// may take either. The squared error hardly depends on which, the share along the row does: the cost is an interval.
inline constexpr double kNearEdge = 1e-3;
struct Coding {
  double low = 0, high = 0;                   // of the cost
  double error = 0, energy = 0, product = 0;  // |e|^2, |z|^2 and <z, z^> over the coded coordinates
};

inline Coding coding(const SpectralKeyHead& head, const VectorD& z, double gain) {
  Coding c;
  double along = 0;
  double either = 0;
  for (std::size_t d = 0; d < head.width.size(); ++d) {
    if (head.width[d] == 0) continue;
    const double half = std::pow(2.0, head.width[d] - 1);
    const double step = gain * static_cast<double>(head.step[d]);
    const double value = z[static_cast<Eigen::Index>(d)];
    const double y = value / step;
    const double decoded = step * (std::clamp(std::floor(y + half), 0.0, 2 * half - 1) - half + 0.5);
    c.error += (decoded - value) * (decoded - value);
    c.energy += value * value;
    c.product += value * decoded;
    along += value * (decoded - value);
    if (std::abs(y - std::round(y)) < kNearEdge && std::abs(y) < half) either += std::abs(value * step);
  }
  const double least = std::max(0.0, std::abs(along) - either);
  const double most = std::abs(along) + either;
  c.low = c.error + 4 * least * least / c.energy;
  c.high = c.error + 4 * most * most / c.energy;
  return c;
}

// Whether the encoder's search around g0 can end at `byte`: costs closer than the rounding of binary32 may come in any order.
inline bool search_may_end_at(int byte, const SpectralKeyHead& head, const VectorD& z, double g0) {
  constexpr double kRounding = 1 + 1e-4;
  const auto lowest = [&](int n) { return coding(head, z, gain_of(n)).low; };
  const auto least_of = [&](const std::vector<int>& bytes) {
    double least = std::numeric_limits<double>::infinity();
    for (const int n : bytes) least = std::min(least, coding(head, z, gain_of(n)).high);
    return kRounding * least;
  };
  const auto in_range = [](int first, int last, int stride) {
    std::vector<int> bytes;
    for (int n = first; n <= last; n += stride) {
      if (n >= 1 && n <= 255) bytes.push_back(n);
    }
    return bytes;
  };
  const double exact = std::clamp(128 + 16 * std::log2(g0), 1.0, 255.0);
  for (const int n0 : {static_cast<int>(std::floor(exact + 0.499)), static_cast<int>(std::floor(exact + 0.501))}) {
    const std::vector<int> coarse = in_range(n0 - 16, n0 + 12, 4);
    const double least = least_of(coarse);
    for (const int middle : coarse) {
      if (lowest(middle) > least) continue;
      const std::vector<int> fine = in_range(middle - 2, middle + 2, 1);
      if (std::find(fine.begin(), fine.end(), byte) != fine.end() && lowest(byte) <= least_of(fine)) return true;
    }
  }
  return false;
}

inline double norm_of(const SpectralKeyHead& head, const VectorD& z) {
  double squares = 0;
  int counted = 0;
  for (std::size_t d = 0; d < head.inverse_sigma.size(); ++d) {
    squares += std::pow(z[static_cast<Eigen::Index>(d)] * static_cast<double>(head.inverse_sigma[d]), 2);
    counted += static_cast<int>(head.inverse_sigma[d] > 0.0F);
  }
  return std::max(1e-3, std::sqrt(squares / std::max(1, counted)));
}

inline VectorD wide(std::span<const float> x) {
  return Eigen::Map<const VectorF>(x.data(), static_cast<Eigen::Index>(x.size())).cast<double>();
}

// A spectrum that falls by 1 / 256 and the widths that go with it.
struct Spectrum {
  SpectralKeyHead head;
  std::vector<float> sigma;
};

inline Spectrum falling_spectrum(int dim) {
  Spectrum s{plain_head(dim, 0), std::vector<float>(size_of(dim))};
  int digits = 0;
  for (int d = 0; d < dim; ++d) {
    const std::size_t i = size_of(d);
    s.sigma[i] = std::pow(0.25F, 4.0F * static_cast<float>(d) / static_cast<float>(dim));
    const int width = d < dim / 16 * 4 ? 6 : (d < dim / 16 * 6 / 4 * 4 ? 4 : (d < dim / 16 * 8 ? 2 : 0));
    s.head.width[i] = width;
    if (width > 0) s.head.step[i] = s.sigma[i] * kGaussianStep[width / 2 - 1];
    s.head.inverse_sigma[i] = d < dim / 2 ? 1.0F / s.sigma[i] : 0.0F;
    digits += width / 2;
  }
  // Digits of a head are filled up to a multiple of 16 with the last coordinates, which hold next to nothing.
  for (int quad = dim / 4 - 1; digits % kSpectralSlots != 0; --quad) {
    for (std::size_t i = 4 * size_of(quad); i < 4 * size_of(quad) + 4; ++i) {
      s.head.width[i] = 2;
      s.head.step[i] = s.sigma[i];
    }
    digits += 4;
  }
  return s;
}

// Gaussian with the deviations sigma.
inline std::vector<float> row_of(const std::vector<float>& sigma, unsigned seed) {
  std::vector<float> row = gaussian(sigma.size(), seed);
  for (std::size_t d = 0; d < row.size(); ++d) row[d] *= sigma[d];
  return row;
}

}  // namespace oscar::test
