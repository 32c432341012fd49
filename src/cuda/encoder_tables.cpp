// Tables of a layer's encoder, from the core's form to the device's.
#include <algorithm>

#include "cuda/append_params.h"
#include "cuda/runtime.h"
#include "oscar/paged/encode_tables.h"

namespace oscar::cuda {

static_assert(kLeastNorm == kSpectralMinNorm);

struct EncoderTables::Impl {
  EncoderView view;
  DeviceArray<float> transform, norm_count, value_factor, value_scale, gain;
  DeviceArray<float4> coordinate;
  DeviceArray<float2> constant_mean, mean;
  DeviceArray<double> theta;
  DeviceArray<ushort2> pair;
};

EncoderTables::EncoderTables(const paged::EncodeTables& t) : impl_(std::make_unique<Impl>()) {
  std::vector<float> transform;
  std::vector<float4> coordinate;
  std::vector<float2> constant_mean, mean;
  for (int h = 0; h < t.n_head_kv; ++h) {
    const auto head = static_cast<std::size_t>(h);
    transform.insert(transform.end(), t.transform[head].data(), t.transform[head].data() + t.transform[head].size());
    for (const paged::KeyCoordinate& c : t.coordinate[head])
      coordinate.push_back({c.inverse_sigma, c.inverse_step, c.weight, c.centre});
    for (int d = 0; d < t.head_dim; ++d) constant_mean.push_back({t.offset(h, d), t.rest(h, d)});
    for (Eigen::Index i = 0; i < t.mean_first.cols(); ++i) mean.push_back({t.mean_first(h, i), t.mean_second(h, i)});
  }
  std::vector<ushort2> pair;
  for (std::size_t i = 0; i < t.theta.size(); ++i) pair.push_back({t.pair_first[i], t.pair_second[i]});

  Impl& m = *impl_;
  m.transform = DeviceArray<float>(transform);
  m.coordinate = DeviceArray<float4>(coordinate);
  m.norm_count = DeviceArray<float>(std::vector<float>(t.norm_count.begin(), t.norm_count.end()));
  m.constant_mean = DeviceArray<float2>(constant_mean);
  m.theta = DeviceArray<double>(t.theta);
  m.pair = DeviceArray<ushort2>(pair);
  m.mean = DeviceArray<float2>(mean);
  m.value_factor = DeviceArray<float>(std::vector<float>(t.value_factor.data(), t.value_factor.data() + t.value_factor.size()));
  m.value_scale = DeviceArray<float>(t.value_scale);
  m.gain = DeviceArray<float>(std::vector<float>(t.gain.begin(), t.gain.end()));
  EncoderView& v = m.view;
  v.n_pairs = static_cast<int>(t.theta.size());
  v.magnitude = t.magnitude;
  v.transform = m.transform.data();
  v.coordinate = m.coordinate.data();
  v.norm_count = m.norm_count.data();
  v.constant_mean = m.constant_mean.data();
  v.theta = m.theta.data();
  v.pair = m.pair.data();
  v.mean = m.mean.data();
  v.value_factor = m.value_factor.data();
  v.value_scale = m.value_scale.data();
  v.gain = m.gain.data();
  v.value_inverse_step = t.value_inverse_step;
  std::copy(t.value_level.begin(), t.value_level.end(), v.value_level);
  std::copy(t.key_gain_edge.begin(), t.key_gain_edge.end(), v.key_gain_edge);
  std::copy(t.value_gain_edge.begin(), t.value_gain_edge.end(), v.value_gain_edge);
}

EncoderTables::~EncoderTables() = default;
const EncoderView& EncoderTables::view() const { return impl_->view; }

}  // namespace oscar::cuda
