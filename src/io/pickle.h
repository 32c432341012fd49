// The pickle machine behind read_torch(): data opcodes of protocol 2 and an allow-list of globals, nothing is ever executed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "oscar/io/torch_file.h"

namespace oscar {

// A storage named by a persistent id: ('storage', torch.<Type>Storage, key, location, numel).
struct TorchStorage {
  std::string dtype;  // safetensors' name
  std::string key;    // entry data/<key> of the zip
  std::int64_t numel = 0;
};

// torch._utils._rebuild_tensor_v2: offset and strides count elements.
struct TorchView {
  TorchStorage storage;
  std::int64_t offset = 0;
  std::vector<std::int64_t> shape, strides;
};

using TorchRebuild = std::function<std::shared_ptr<TorchTensor>(const TorchView&)>;

// `what` names the pickle in errors, which give opcode and offset.
TorchValue unpickle(std::span<const std::byte> bytes, const std::string& what, const TorchRebuild& rebuild);

// torch's storage class of a dtype ("F32" -> "FloatStorage"); empty: torch has none.
std::string torch_storage_name(const std::string& dtype);

}  // namespace oscar
