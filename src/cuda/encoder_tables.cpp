// Tables of a layer's encoder, from the core's form to the device's.
#include <algorithm>

#include "cuda/append_params.h"
#include "cuda/runtime.h"
#include "oscar/paged/encode_tables.h"
#include "oscar/paged/int2_pages.h"

namespace oscar::cuda {

static_assert(kLeastNorm == kSpectralMinNorm);

namespace {

std::vector<float> floats(const MatrixF& m) { return {m.data(), m.data() + m.size()}; }
std::vector<float> floats(const std::vector<MatrixF>& matrices) {
  std::vector<float> all;
  for (const MatrixF& m : matrices) all.insert(all.end(), m.data(), m.data() + m.size());
  return all;
}

}  // namespace

struct EncoderTables::Impl {
  EncoderView view;
  DeviceArray<float> transform, norm_count, value_factor, value_scale, gain, value_transform, value_mean;
  DeviceArray<std::int32_t> clip_rank;
  DeviceArray<float4> coordinate;
  DeviceArray<float2> constant_mean, mean;
  DeviceArray<double> theta;
  DeviceArray<ushort2> pair;

  void add_means(const paged::KeyMeanTables& t) {
    std::vector<float2> constants, turned;
    for (Eigen::Index h = 0; h < t.offset.rows(); ++h) {
      for (Eigen::Index d = 0; d < t.offset.cols(); ++d) constants.push_back({t.offset(h, d), t.rest(h, d)});
      for (Eigen::Index i = 0; i < t.mean_first.cols(); ++i) turned.push_back({t.mean_first(h, i), t.mean_second(h, i)});
    }
    std::vector<ushort2> pairs;
    for (std::size_t i = 0; i < t.theta.size(); ++i) pairs.push_back({t.pair_first[i], t.pair_second[i]});
    constant_mean = DeviceArray<float2>(constants);
    theta = DeviceArray<double>(t.theta);
    pair = DeviceArray<ushort2>(pairs);
    mean = DeviceArray<float2>(turned);
    view.n_head_kv = static_cast<int>(t.offset.rows());
    view.head_dim = static_cast<int>(t.offset.cols());
    view.n_pairs = static_cast<int>(t.theta.size());
    view.magnitude = t.magnitude;
    view.constant_mean = constant_mean.data();
    view.theta = theta.data();
    view.pair = pair.data();
    view.mean = mean.data();
  }
};

EncoderTables::EncoderTables(const paged::EncodeTables& t) : impl_(std::make_unique<Impl>()) {
  std::vector<float4> coordinate;
  for (const auto& head : t.coordinate) {
    for (const paged::KeyCoordinate& c : head) coordinate.push_back({c.inverse_sigma, c.inverse_step, c.weight, c.centre});
  }
  Impl& m = *impl_;
  m.add_means(t);
  m.transform = DeviceArray<float>(floats(t.transform));
  m.coordinate = DeviceArray<float4>(coordinate);
  m.norm_count = DeviceArray<float>(std::vector<float>(t.norm_count.begin(), t.norm_count.end()));
  m.value_factor = DeviceArray<float>(floats(t.value_factor));
  m.value_scale = DeviceArray<float>(t.value_scale);
  m.gain = DeviceArray<float>(std::vector<float>(t.gain.begin(), t.gain.end()));
  EncoderView& v = m.view;
  v.transform = m.transform.data();
  v.coordinate = m.coordinate.data();
  v.norm_count = m.norm_count.data();
  v.value_factor = m.value_factor.data();
  v.value_scale = m.value_scale.data();
  v.gain = m.gain.data();
  v.value_inverse_step = t.value_inverse_step;
  std::copy(t.value_level.begin(), t.value_level.end(), v.value_level);
  std::copy(t.key_gain_edge.begin(), t.key_gain_edge.end(), v.key_gain_edge);
  std::copy(t.value_gain_edge.begin(), t.value_gain_edge.end(), v.value_gain_edge);
}

EncoderTables::EncoderTables(const paged::Int2EncodeTables& t) : impl_(std::make_unique<Impl>()) {
  Impl& m = *impl_;
  m.add_means(t);
  m.transform = DeviceArray<float>(floats(t.key_rotation));
  m.value_transform = DeviceArray<float>(floats(t.value_rotation));
  m.value_mean = DeviceArray<float>(floats(t.value_mean));
  std::vector<std::int32_t> ranks(t.key_rank.begin(), t.key_rank.end());
  ranks.insert(ranks.end(), t.value_rank.begin(), t.value_rank.end());
  m.clip_rank = DeviceArray<std::int32_t>(ranks);
  m.view.codec = paged::PageCodec::int2;
  m.view.transform = m.transform.data();
  m.view.value_transform = m.value_transform.data();
  m.view.value_mean = m.value_mean.data();
  m.view.clip_rank = m.clip_rank.data();
}

EncoderTables::~EncoderTables() = default;
const EncoderView& EncoderTables::view() const { return impl_->view; }

}  // namespace oscar::cuda
