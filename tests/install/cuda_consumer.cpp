// Uses the installed CUDA library where no GPU is needed: sizes follow from the shape, and what does not fit is refused.
#include <oscar/base/error.h>
#include <oscar/cuda/decode.h>

#include <cstdio>

int main() {
  oscar::cuda::LayerView layer;
  layer.n_head_kv = 1;
  layer.head_dim = 128;
  layer.max_slots = layer.slots[0] = 128;
  layer.page_bytes = oscar::paged::head_bytes(128, 128);
  const std::size_t bytes = oscar::cuda::decode_workspace_bytes(layer, 1, 4);
  try {
    layer.head_dim = 96;
    static_cast<void>(oscar::cuda::decode_workspace_bytes(layer, 1, 4));
  } catch (const oscar::Error& error) {
    std::printf("oscar::cuda: a workspace of %zu bytes; %s\n", bytes, error.what());
    return bytes > 0 ? 0 : 1;
  }
  return 1;
}
