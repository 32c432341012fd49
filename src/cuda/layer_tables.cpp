// Static tables of a layer, from the core's form to the device's.
#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <numeric>

#include "cuda/mean_series.h"
#include "cuda/runtime.h"
#include "oscar/base/half.h"
#include "oscar/cuda/decode.h"
#include "oscar/paged/int2_pages.h"
#include "oscar/paged/spectral_pages.h"

namespace oscar::cuda {
namespace {

constexpr int kPairsStep = 16;  // of a k-step
constexpr int kPairsPad = 32;   // the kernel takes two at a time
// Pairs that turn by less than this over half a page are slow: their table holds cos - 1.
constexpr double kSlow = 1.0;
// Of polynomials that stand for a pair, relative to it: no more than its weight's rounding to binary16.
constexpr double kSeriesError = 0x1p-11;

std::size_t size_of(int n) { return static_cast<std::size_t>(n); }

std::vector<float> floats(const MatrixF& m) { return {m.data(), m.data() + m.size()}; }
std::vector<float> floats(const std::vector<MatrixF>& matrices) {
  std::vector<float> all;
  for (const MatrixF& m : matrices) all.insert(all.end(), m.data(), m.data() + m.size());
  return all;
}

// Largest weight that a coordinate of a query has in a slot of the codes.
float query_peak(const MatrixF& query, const std::vector<std::uint16_t>& source) {
  float most = 0;
  for (const std::uint16_t from : source)
    most = std::max(most, query.col(from % 4096).cwiseAbs().maxCoeff() * static_cast<float>(1U << (2U * (from / 4096U))));
  return most;
}

std::uint16_t to_half(double x) { return float_to_half(static_cast<float>(x)); }

double chebyshev(int k, double x) { return std::cos(k * std::acos(std::clamp(x, -1.0, 1.0))); }
// Whether T_0 .. T_7 are enough for e^(i theta x), x within kReach: the first coefficient that is missing is 2 J_8(theta
// kReach), J_n(z) <= (z / 2)^n / n!.
bool is_polynomial(double theta) {
  double error = 2.0;
  for (int n = 1; n <= kPolynomials; ++n) error *= theta * kReach / 2.0 / n;
  return error <= kSeriesError;
}
// Coefficients of T_0, T_2, .. of cos(theta x) - 1 and of T_1, T_3, .. of -sin(theta x), from the values at Chebyshev's nodes.
std::array<double, kPolynomials> series_of(double theta) {
  constexpr int kNodes = 32;
  std::array<double, kPolynomials> result{};
  for (int n = 0; n < kNodes; ++n) {
    const double x = std::cos(std::numbers::pi * (n + 0.5) / kNodes);
    const double half_sine = std::sin(theta * kReach * x / 2);
    const double value[2] = {-2.0 * half_sine * half_sine, -std::sin(theta * kReach * x)};
    for (int k = 0; k < kPolynomials; ++k) result[size_of(k)] += (k == 0 ? 1.0 : 2.0) / kNodes * value[k % 2] * chebyshev(k, x);
  }
  return result;
}

}  // namespace

struct LayerTables::Impl {
  LayerView view;
  DeviceArray<float> query, peak, constant, mean, unit, signs, output, value_mean;
  DeviceArray<std::uint16_t> source, pair;
  DeviceArray<double> turns;
  DeviceArray<std::uint16_t> table, series;

  void add_keys(const paged::KeyTables& t) {
    view.codec = t.layout.codec;
    view.n_head_kv = t.layout.n_head_kv;
    view.head_dim = t.layout.head_dim;
    view.page_bytes = t.layout.page_bytes;
    view.max_slots = *std::max_element(t.layout.key_slots.begin(), t.layout.key_slots.end());
    std::vector<std::uint16_t> slots(size_of(view.n_head_kv * view.max_slots), 0);
    std::vector<float> peaks;
    for (int h = 0; h < view.n_head_kv; ++h) {
      view.slots[h] = static_cast<std::uint16_t>(t.layout.key_slots[size_of(h)]);
      view.head_offset[h] = t.layout.head_offset[size_of(h)];
      std::copy(t.slot_source[size_of(h)].begin(), t.slot_source[size_of(h)].end(), slots.begin() + h * view.max_slots);
      peaks.push_back(query_peak(t.query[size_of(h)], t.slot_source[size_of(h)]));
    }
    query = DeviceArray<float>(floats(t.query));
    source = DeviceArray<std::uint16_t>(slots);
    constant = DeviceArray<float>(floats(t.key_constant));
    peak = DeviceArray<float>(peaks);
    view.query = query.data();
    view.query_peak = peak.data();
    view.slot_source = source.data();
    view.key_constant = constant.data();
    if (!t.theta.empty()) add_means(t);
  }

  void add_means(const paged::KeyTables& t) {
    const int n = static_cast<int>(t.theta.size());
    // Fast pairs first, in whole k-steps of 16; what pads has weight 0.
    std::vector<int> order(size_of(n));
    std::iota(order.begin(), order.end(), 0);
    const auto speed = [&](int i) { return std::abs(t.theta[size_of(i)]); };
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return speed(a) > speed(b); });
    const auto n_fast =
        std::count_if(order.begin(), order.end(), [&](int i) { return speed(i) * paged::kPageTokens / 2 >= kSlow; });
    const int fast = static_cast<int>(n_fast) / kPairsStep * kPairsStep;
    const int pairs = (n + kPairsPad - 1) / kPairsPad * kPairsPad;
    order.resize(size_of(pairs), -1);
    view.n_pairs = pairs;
    view.n_fast_pairs = fast;

    std::vector<float> means(size_of(view.n_head_kv * pairs * 2), 0.0F);
    std::vector<std::uint16_t> coordinates(size_of(2 * pairs), 0);
    std::vector<double> angles(size_of(pairs), 0.0);
    std::vector<std::uint16_t> cells(size_of(pairs / 16 * 4 * 32 * 4 * 2), 0);
    for (int i = 0; i < pairs; ++i) {
      const int from = order[size_of(i)];
      if (from < 0) continue;
      const double theta = t.theta[size_of(from)];
      coordinates[size_of(2 * i)] = t.pair_first[size_of(from)];
      coordinates[size_of(2 * i + 1)] = t.pair_second[size_of(from)];
      angles[size_of(i)] = theta / (2.0 * std::numbers::pi);
      for (int h = 0; h < view.n_head_kv; ++h) {
        means[size_of(2 * (h * pairs + i))] = t.mean_first(h, from);
        means[size_of(2 * (h * pairs + i) + 1)] = t.mean_second(h, from);
      }
      for (int x = 0; x < paged::kPageTokens / 2; ++x) {
        // Row x mod 16 of fragment x / 16, column i mod 16; a register holds two columns.
        const int row = x % 16;
        const int lane = row % 8 * 4 + i % 8 / 2;
        const int cell = row / 8 + i % 16 / 8 * 2;
        const double angle = (x + 0.5) * theta;
        const auto at = [&](int fragment) { return size_of((((i / 16 * 4 + fragment) * 32 + lane) * 4 + cell) * 2 + i % 2); };
        const double half_sine = std::sin(angle / 2);
        cells[at(x / 16)] = to_half(i < fast ? std::cos(angle) : -2.0 * half_sine * half_sine);
        cells[at(2 + x / 16)] = to_half(-std::sin(angle));
      }
    }
    mean = DeviceArray<float>(means);
    pair = DeviceArray<std::uint16_t>(coordinates);
    turns = DeviceArray<double>(angles);
    table = DeviceArray<std::uint16_t>(cells);
    view.mean = mean.data();
    view.pair = pair.data();
    view.turns = turns.data();
    view.mean_table = table.data();
    add_series(angles);
  }

  // angles: of pairs, per position, / 2 pi; fast ones first.
  void add_series(const std::vector<double>& angles) {
    const auto theta = [&](int i) { return 2.0 * std::numbers::pi * angles[size_of(i)]; };
    int turned = 0;
    while (turned < view.n_pairs && !is_polynomial(std::abs(theta(turned)))) turned += kPairsStep;
    view.n_turned_pairs = turned;
    if (turned == view.n_pairs) return;
    std::vector<std::uint16_t> cells;
    for (int step = turned; step < view.n_pairs; step += kPairsStep) {
      for (int lane = 0; lane < 32; ++lane) {
        const int k = lane / 4;
        for (int cell = 0; cell < 8; ++cell) {
          const bool imaginary = cell >= 4;
          const int pair = step + lane % 4 * 2 + cell % 2 + cell / 2 % 2 * 8;
          cells.push_back(to_half(imaginary == (k % 2 == 1) ? series_of(theta(pair))[size_of(k)] : 0.0));
        }
      }
    }
    for (int turn = 0; turn < kGroupTurns; ++turn) {
      for (int tile = 0; tile < 4; tile += 2) {
        for (int lane = 0; lane < 32; ++lane) {
          for (int cell = 0; cell < 8; ++cell) {
            const int row = (tile + cell / 4) * 16 + lane / 4 + cell / 2 % 2 * 8;
            const int token = row < paged::kPageTokens / 2 ? row ^ 15 : row;  // mirrored tokens share a lane
            const double x = group_offset(turn) + token - (paged::kPageTokens - 1) / 2.0;
            cells.push_back(to_half(chebyshev(lane % 4 * 2 + cell % 2, x / kReach)));
          }
        }
      }
    }
    series = DeviceArray<std::uint16_t>(cells);
    view.series_tables = series.data();
  }
};

LayerTables::LayerTables(const paged::SpectralTables& t) : impl_(std::make_unique<Impl>()) {
  Impl& m = *impl_;
  m.add_keys(t);
  m.unit = DeviceArray<float>(t.value_unit);
  m.signs = DeviceArray<float>(floats(t.value_signs));
  m.view.value_unit = m.unit.data();
  m.view.value_signs = m.signs.data();
}

LayerTables::LayerTables(const paged::Int2Tables& t) : impl_(std::make_unique<Impl>()) {
  Impl& m = *impl_;
  m.add_keys(t);
  m.output = DeviceArray<float>(floats(t.value_output));
  m.value_mean = DeviceArray<float>(floats(t.value_mean));
  m.view.value_output = m.output.data();
  m.view.value_mean = m.value_mean.data();
}

LayerTables::~LayerTables() = default;
const LayerView& LayerTables::view() const { return impl_->view; }

}  // namespace oscar::cuda
