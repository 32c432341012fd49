// Made-up tables of a layer of either codec, on the host and on the device.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "oscar/cuda/decode.h"
#include "paged_world.h"

namespace oscar::test {

// Of the one that is there.
inline std::unique_ptr<cuda::LayerTables> on_device(const paged::SpectralTables* spectral, const paged::Int2Tables* int2) {
  return int2 != nullptr ? std::make_unique<cuda::LayerTables>(*int2) : std::make_unique<cuda::LayerTables>(*spectral);
}

class RandomLayer {
 public:
  // int2: as many heads as slots says. values_mean: whether values of `int2` have a mean.
  RandomLayer(bool int2, int dim, const std::vector<int>& slots, double mean, bool values_mean, unsigned seed,
              double rope_base = 1e6)
      : is_int2_(int2) {
    if (int2) {
      int2_ = random_int2_tables(dim, static_cast<int>(slots.size()), mean, values_mean, seed);
    } else {
      spectral_ = random_tables(dim, slots, mean, seed, rope_base);
    }
  }
  [[nodiscard]] const paged::PageLayout& layout() const { return is_int2_ ? int2_.layout : spectral_.layout; }
  // Refers to this layer.
  [[nodiscard]] PagedWorld world(WorldShape shape, unsigned seed) const {
    return is_int2_ ? PagedWorld(int2_, std::move(shape), seed) : PagedWorld(spectral_, std::move(shape), seed);
  }
  [[nodiscard]] std::unique_ptr<cuda::LayerTables> on_device() const {
    return test::on_device(&spectral_, is_int2_ ? &int2_ : nullptr);
  }

 private:
  bool is_int2_;
  paged::SpectralTables spectral_;
  paged::Int2Tables int2_;
};

}  // namespace oscar::test
