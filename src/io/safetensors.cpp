#include "oscar/io/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "oscar/base/error.h"
#include "oscar/base/half.h"
#include "oscar/io/dtype.h"
#include "oscar/io/files.h"
#include "oscar/io/json.h"

namespace oscar {
namespace {

constexpr std::uint64_t kMaxHeader = 100'000'000;  // the limit of the reference implementation
constexpr const char* kMetadata = "__metadata__";

struct Placed {  // a tensor and where its bytes lie in the data section
  std::string name;
  SafeTensor tensor;
  std::uint64_t begin = 0, end = 0;
};

std::uint64_t unsigned_of(const nlohmann::json& value, const std::string& what) {
  if (!value.is_number_unsigned()) fail("{} is not a non-negative integer", what);
  return value.get<std::uint64_t>();
}

Placed parse_tensor(const std::string& name, const nlohmann::json& entry, std::uint64_t data_size, const std::string& file) {
  const std::string what = fmt::format("tensor '{}' of '{}'", name, file);
  Placed placed;
  placed.name = name;
  placed.tensor.dtype = json_text(entry, "dtype", what);
  const std::size_t element = dtype_size(placed.tensor.dtype);
  if (element == 0) fail("{} has the unknown dtype '{}'", what, placed.tensor.dtype);
  for (const nlohmann::json& dimension : json_array(entry, "shape", what)) {
    const std::uint64_t size = unsigned_of(dimension, "a dimension of " + what);
    if (size > static_cast<std::uint64_t>(INT64_MAX)) fail("a dimension of {} is too large", what);
    placed.tensor.shape.push_back(static_cast<std::int64_t>(size));
  }
  const nlohmann::json& offsets = json_array(entry, "data_offsets", what);
  if (offsets.size() != 2) fail("'data_offsets' of {} must hold two numbers", what);
  placed.begin = unsigned_of(offsets[0], "an offset of " + what);
  placed.end = unsigned_of(offsets[1], "an offset of " + what);
  if (placed.begin > placed.end || placed.end > data_size) {
    fail("{} claims bytes {}..{} but the file holds {} bytes of data; it is incomplete or corrupt", what, placed.begin,
         placed.end, data_size);
  }
  if (entry.size() != 3) fail("{} has fields other than dtype, shape and data_offsets", what);
  const auto bytes = checked_bytes(placed.tensor.shape, element);
  if (!bytes) fail("the shape of {} is too large", what);
  if (*bytes != placed.end - placed.begin) {
    fail("size mismatch: {} needs {} bytes by its shape but its offsets span {}", what, *bytes, placed.end - placed.begin);
  }
  return placed;
}

void require_tiling(std::vector<Placed>& tensors, std::uint64_t data_size, const std::string& file) {
  std::sort(tensors.begin(), tensors.end(), [](const Placed& a, const Placed& b) {
    return a.begin != b.begin ? a.begin < b.begin : (a.end != b.end ? a.end < b.end : a.name < b.name);
  });
  std::uint64_t expected = 0;
  for (const Placed& tensor : tensors) {
    if (tensor.begin < expected) fail("tensor '{}' of '{}' overlaps the tensor before it", tensor.name, file);
    if (tensor.begin > expected)
      fail("'{}' has a hole of {} bytes before tensor '{}'", file, tensor.begin - expected, tensor.name);
    expected = tensor.end;
  }
  if (expected != data_size) fail("'{}' has {} trailing bytes after its last tensor", file, data_size - expected);
}

template <class T>
SafeTensor pack(std::span<const T> values, std::vector<std::int64_t> shape, const char* dtype) {
  const auto bytes = checked_bytes(shape, sizeof(T));
  if (!bytes || *bytes != values.size_bytes()) fail("a tensor of {} values does not have the shape it is given", values.size());
  SafeTensor tensor{dtype, std::move(shape), std::vector<std::byte>(values.size_bytes())};
  if (!values.empty()) std::memcpy(tensor.bytes.data(), values.data(), values.size_bytes());
  return tensor;
}

template <class T>
T element(const SafeTensor& tensor, std::size_t index) {
  T value;
  std::memcpy(&value, tensor.bytes.data() + index * sizeof(T), sizeof(T));
  return value;
}

template <class T>
std::vector<T> convert(const SafeTensor& tensor, const std::string& what) {
  const std::size_t size = dtype_size(tensor.dtype);
  if (size == 0 || tensor.bytes.size() % size != 0) fail("{} has dtype '{}', which is not supported", what, tensor.dtype);
  std::vector<T> values(tensor.bytes.size() / size);
  const auto fill = [&](auto read) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<T>(read(i));
  };
  if (tensor.dtype == "F32") {
    fill([&](std::size_t i) { return element<float>(tensor, i); });
  } else if (tensor.dtype == "F64") {
    fill([&](std::size_t i) { return element<double>(tensor, i); });
  } else if (tensor.dtype == "F16") {
    fill([&](std::size_t i) { return half_to_float(element<std::uint16_t>(tensor, i)); });
  } else if (tensor.dtype == "BF16") {
    fill([&](std::size_t i) {
      return std::bit_cast<float>(static_cast<std::uint32_t>(element<std::uint16_t>(tensor, i)) << 16);
    });
  } else {
    fail("{} has dtype '{}'; F16, BF16, F32 or F64 is needed", what, tensor.dtype);
  }
  return values;
}

}  // namespace

SafeTensors read_safetensors(const std::filesystem::path& path) {
  const FileReader file(path);
  const std::string name = path.string();
  std::uint64_t header_size = 0;
  if (file.size() < sizeof(header_size) + 2) fail("'{}' is too short ({} bytes) for a safetensors file", name, file.size());
  file.read(0, std::as_writable_bytes(std::span(&header_size, 1)));
  const std::uint64_t rest = file.size() - sizeof(header_size);
  if (header_size < 2 || header_size > rest || header_size > kMaxHeader) {
    fail("'{}' is not a safetensors file, or it is incomplete: its header claims {} bytes of {}", name, header_size, rest);
  }
  std::string text(header_size, '\0');
  file.read(sizeof(header_size), std::as_writable_bytes(std::span(text)));
  if (text.front() != '{') fail("'{}' is not a safetensors file: its header does not start with '{{'", name);
  const nlohmann::json header = parse_json(text, fmt::format("the header of '{}'", name));

  SafeTensors result;
  const std::uint64_t data_size = rest - header_size;
  std::vector<Placed> placed;
  for (const auto& [key, entry] : header.items()) {
    if (key != kMetadata) {
      placed.push_back(parse_tensor(key, entry, data_size, name));
      continue;
    }
    if (!entry.is_object()) fail("'{}' of '{}' is not a JSON object", kMetadata, name);
    for (const auto& [word, value] : entry.items()) {
      if (!value.is_string()) fail("metadata '{}' of '{}' is not a string", word, name);
      result.metadata.emplace(word, value.get<std::string>());
    }
  }
  require_tiling(placed, data_size, name);  // before any tensor is allocated: the sum of all sizes is now the file's
  for (Placed& tensor : placed) {
    tensor.tensor.bytes.resize(tensor.end - tensor.begin);
    file.read(sizeof(header_size) + header_size + tensor.begin, tensor.tensor.bytes);
    result.tensors.emplace(std::move(tensor.name), std::move(tensor.tensor));
  }
  return result;
}

void write_safetensors(const SafeTensors& file, const std::filesystem::path& path) {
  std::vector<TensorSource> tensors;
  for (const auto& [name, tensor] : file.tensors) {
    tensors.push_back({name, tensor.dtype, tensor.shape, [&bytes = tensor.bytes](const ByteSink& sink) { sink(bytes); }});
  }
  write_safetensors(std::move(tensors), file.metadata, path);
}

void write_safetensors(std::vector<TensorSource> tensors, const std::map<std::string, std::string>& metadata,
                       const std::filesystem::path& path) {
  // Wide elements first, as the reference writer does: with a header padded to 8 bytes every tensor is aligned for mmap.
  std::sort(tensors.begin(), tensors.end(), [](const TensorSource& a, const TensorSource& b) {
    const std::size_t width_a = dtype_size(a.dtype), width_b = dtype_size(b.dtype);
    return width_a != width_b ? width_a > width_b : a.name < b.name;
  });
  nlohmann::json header = nlohmann::json::object();
  if (!metadata.empty()) header[kMetadata] = metadata;
  std::uint64_t offset = 0;
  for (const TensorSource& tensor : tensors) {
    const std::size_t size = dtype_size(tensor.dtype);
    const auto bytes = checked_bytes(tensor.shape, size);
    if (tensor.name == kMetadata || size == 0 || !bytes || header.contains(tensor.name))
      fail("tensor '{}' ({}) cannot be written to '{}': its name, dtype or shape is wrong", tensor.name, tensor.dtype,
           path.string());
    header[tensor.name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + *bytes}}};
    offset += *bytes;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const nlohmann::json::exception&) {
    fail("'{}' cannot be written: a tensor name or metadata text is not UTF-8", path.string());
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  if (text.size() > kMaxHeader)
    fail("'{}' cannot be written: its header has {} bytes, over the limit", path.string(), text.size());

  AtomicFile out(path);
  const std::uint64_t header_size = text.size();
  out.write(std::as_bytes(std::span(&header_size, 1)));
  out.write(text);
  for (const TensorSource& tensor : tensors) {
    std::uint64_t written = 0;
    tensor.write([&](std::span<const std::byte> bytes) {
      written += bytes.size();
      out.write(bytes);
    });
    if (written != *checked_bytes(tensor.shape, dtype_size(tensor.dtype))) {
      fail("tensor '{}' ({}, {} bytes) cannot be written to '{}': its name, dtype or shape is wrong", tensor.name, tensor.dtype,
           written, path.string());
    }
  }
  out.commit();
}

SafeTensor to_tensor(std::span<const float> values, std::vector<std::int64_t> shape) {
  return pack(values, std::move(shape), "F32");
}
SafeTensor to_tensor(std::span<const double> values, std::vector<std::int64_t> shape) {
  return pack(values, std::move(shape), "F64");
}

std::vector<float> to_floats(const SafeTensor& tensor, const std::string& what) { return convert<float>(tensor, what); }
std::vector<double> to_doubles(const SafeTensor& tensor, const std::string& what) { return convert<double>(tensor, what); }

}  // namespace oscar
