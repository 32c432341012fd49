// Compares the device's append with the CPU codec, byte for byte, on sizes that are awkward on purpose. Needs a GPU, so it is a
// program of its own and no test of ctest; ctest runs it on an emulated one (emulated_append.cpp).
// usage: append_check [--quick]      --quick: small cases only (for compute-sanitizer)
#include <algorithm>
#include <bit>
#include <cstdio>
#include <memory>
#include <string_view>

#include "cuda/runtime.h"
#include "device_ids.h"
#include "oscar/base/half.h"
#include "oscar/cuda/append.h"
#include "oscar/paged/append_reference.h"
#include "oscar/paged/encode_tables.h"
#include "paged/int2_layer.h"
#include "paged/spectral_layer.h"

namespace {

using namespace oscar;
using cuda::check;
using cuda::DeviceArray;
using test::size_of;

enum class Kind { spectral, int2, int2_constant_means, int2_unrotated };

struct Case {
  const char* name;
  int heads, dim;
  std::vector<std::int32_t> lengths;  // after the append
  std::vector<int> counts;            // new rows; empty: one row per sequence
  bool means = true;
  int gap = 0;                // values between rows of k and v, beyond their own
  std::size_t far_bytes = 0;  // pages are moved so far into the pool
  int sink = 64, ring = 17;
  test::Wide wide = test::Wide::none;
  Kind kind = Kind::spectral;
};

// A layer of either codec.
struct Layer {
  paged::PageLayout layout;
  std::unique_ptr<Codec> keys, values;
  std::unique_ptr<cuda::LayerTables> tables;
  std::unique_ptr<cuda::EncoderTables> encoder;

  explicit Layer(const Case& c) {
    const RopePairing pairing = c.dim == 64 ? RopePairing::norm : RopePairing::neox;
    const int n_rot = c.dim == 256 ? 64 : 0;
    if (c.kind == Kind::spectral) {
      test::SpectralLayer layer = test::spectral_layer(c.heads, c.dim, 40, pairing, n_rot);
      if (!c.means) layer.keys.mean = layer.keys.mean_pre_rope = MatrixF();
      keys = make_spectral_key_codec(layer.keys);
      values = make_spectral_value_codec(layer.values);
      make_tables(paged::spectral_tables(layer.keys, layer.values), paged::encode_tables(layer.keys, layer.values));
    } else {
      const test::Int2Means means = !c.means                              ? test::Int2Means::none
                                    : c.kind == Kind::int2_constant_means ? test::Int2Means::constant
                                                                          : test::Int2Means::pre_rope;
      test::Int2Layer layer = test::int2_layer(c.heads, c.dim, 40, means, pairing, n_rot);
      if (c.kind == Kind::int2_unrotated) layer.keys.rotation = layer.values.rotation = {};
      keys = make_int2_codec(layer.keys);
      values = make_int2_codec(layer.values);
      make_tables(paged::int2_tables(layer.keys, layer.values), paged::int2_encode_tables(layer.keys, layer.values));
    }
  }

 private:
  template <class Tables, class Encode>
  void make_tables(const Tables& t, const Encode& e) {
    layout = t.layout;
    tables = std::make_unique<cuda::LayerTables>(t);
    encoder = std::make_unique<cuda::EncoderTables>(e);
  }
};

// Everything an append reads and writes, on the host.
struct World {
  const Case& c;
  Layer layer;
  int page_columns = 1, n_rows = 0;
  std::size_t row_values = 0;
  std::vector<std::int32_t> row_start{0}, page_table, block_table;
  std::vector<std::uint16_t> k, v, blocks;
  std::vector<std::uint8_t> pages;

  explicit World(const Case& which) : c(which), layer(which) {
    std::mt19937 rng(9);
    std::normal_distribution<float> normal;
    const auto batch = c.lengths.size();
    for (std::size_t b = 0; b < batch; ++b) {
      row_start.push_back(row_start.back() + (c.counts.empty() ? 1 : c.counts[b]));
      page_columns = std::max(page_columns, (c.lengths[b] + 63) / 64);
    }
    n_rows = row_start.back();
    row_values = size_of(c.heads * c.dim);
    k.resize(size_of(n_rows) * row_values);
    v.resize(k.size());
    for (std::uint16_t& x : k) x = float_to_half(normal(rng));
    for (std::uint16_t& x : v) x = float_to_half(normal(rng));
    spoil_some(rng);
    // Only pages and blocks that rows go to exist, in shuffled order; some are left out on purpose.
    const int columns = c.sink / paged::kBlockTokens + c.ring;
    page_table.assign(batch * size_of(page_columns), -1);
    block_table.assign(batch * size_of(columns), -1);
    std::vector<std::int32_t*> used_pages, used_blocks;
    for (std::size_t b = 0; b < batch; ++b) {
      const int count = row_start[b + 1] - row_start[b];
      for (int position = std::max(0, c.lengths[b] - count); position < c.lengths[b]; ++position) {
        std::int32_t& page = page_table[b * size_of(page_columns) + size_of(position / 64)];
        std::int32_t& block = block_table[b * size_of(columns) + size_of(paged::block_column(position, c.sink, c.ring))];
        if (page == -1) used_pages.push_back(&page);
        if (block == -1) used_blocks.push_back(&block);
        page = block = -2;
      }
    }
    std::shuffle(used_pages.begin(), used_pages.end(), rng);
    std::shuffle(used_blocks.begin(), used_blocks.end(), rng);
    const auto number = [&](std::vector<std::int32_t*>& used) {
      std::int32_t next = 0;
      for (std::size_t i = 0; i < used.size(); ++i) *used[i] = i % 13 == 12 ? -1 : next++;
      return size_of(std::max(1, next));
    };
    pages.resize(number(used_pages) * layer.layout.page_bytes);
    blocks.resize(number(used_blocks) * size_of(c.heads) * paged::exact_head_values(c.dim));
    for (std::uint8_t& x : pages) x = static_cast<std::uint8_t>(rng());
    for (std::uint16_t& x : blocks) x = static_cast<std::uint16_t>(rng());
  }

  // What the codec treats apart: NaN and infinities, rows that are zero, tiny, or nothing but large.
  void spoil_some(std::mt19937& rng) {
    for (int r = 0; r < n_rows; ++r) {
      std::uint16_t* const rows[] = {k.data() + size_of(r) * row_values, v.data() + size_of(r) * row_values};
      for (std::uint16_t* row : rows) {
        switch (rng() % 40) {
          case 0:
            row[rng() % row_values] = 0x7E00;
            row[rng() % row_values] = 0xFC00;
            break;
          case 1:
            std::fill_n(row, row_values, std::uint16_t{0});
            break;
          case 2:
            for (std::size_t i = 0; i < row_values; ++i) row[i] = static_cast<std::uint16_t>(rng() % 4);
            break;
          case 3:
            for (std::size_t i = 0; i < row_values; ++i) row[i] = static_cast<std::uint16_t>(0x7BFF | (rng() % 2) << 15);
            break;
          default:
            break;
        }
      }
    }
  }

  [[nodiscard]] const std::int32_t* starts() const { return c.counts.empty() ? nullptr : row_start.data(); }

  void append_on_host() {
    paged::AppendProblem p;
    p.layout = &layer.layout;
    p.keys = layer.keys.get();
    p.values = layer.values.get();
    p.batch = static_cast<int>(c.lengths.size());
    p.sink = c.sink;
    p.k = k.data();
    p.v = v.data();
    p.row_start = starts();
    p.lengths = c.lengths.data();
    p.pages = pages.data();
    p.page_table = page_table.data();
    p.page_columns = page_columns;
    p.blocks = blocks.data();
    p.block_table = block_table.data();
    p.ring = c.ring;
    paged::append_reference(p);
  }
};

class OnDevice {
 public:
  explicit OnDevice(const World& w)
      : k_(spread(w.k, w)),
        v_(spread(w.v, w)),
        blocks_(w.blocks),
        row_start_(w.row_start),
        lengths_(w.c.lengths),
        page_table_(w.page_table, test::wide_pages(w.c.wide), first_page(w)),
        block_table_(w.block_table, test::wide_blocks(w.c.wide)),
        size_(w.pages.size()),
        offset_(size_of(first_page(w)) * w.layer.layout.page_bytes) {
    pages_ = DeviceArray<std::uint8_t>(offset_ + size_);
    check(cudaMemcpy(pages_.data() + offset_, w.pages.data(), size_, cudaMemcpyHostToDevice), "cudaMemcpy");
    args_.layer = &w.layer.tables->view();
    args_.encoder = &w.layer.encoder->view();
    args_.batch = static_cast<int>(w.c.lengths.size());
    args_.n_rows = w.n_rows;
    args_.sink = w.c.sink;
    args_.k = k_.data();
    args_.v = v_.data();
    args_.k_stride = args_.v_stride = static_cast<std::int64_t>(w.row_values) + w.c.gap;
    args_.row_start = w.starts() == nullptr ? nullptr : row_start_.data();
    args_.lengths = lengths_.data();
    args_.pages = pages_.data();
    args_.page_table = page_table_.table();
    args_.page_columns = w.page_columns;
    args_.blocks = blocks_.data();
    args_.block_table = block_table_.table();
    args_.ring = w.c.ring;
  }
  void append() {
    cuda::append(args_, nullptr);
    check(cudaDeviceSynchronize(), "an append");
  }
  [[nodiscard]] std::vector<std::uint8_t> pages() const {
    std::vector<std::uint8_t> host(size_);
    check(cudaMemcpy(host.data(), pages_.data() + offset_, size_, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return host;
  }
  [[nodiscard]] std::vector<std::uint16_t> blocks() const { return blocks_.download(); }

 private:
  static std::int32_t first_page(const World& w) {
    return static_cast<std::int32_t>((w.c.far_bytes + w.layer.layout.page_bytes - 1) / w.layer.layout.page_bytes);
  }
  // Rows apart, NaN between them.
  static std::vector<std::uint16_t> spread(const std::vector<std::uint16_t>& rows, const World& w) {
    std::vector<std::uint16_t> out;
    for (std::size_t at = 0; at < rows.size(); at += w.row_values) {
      out.insert(out.end(), rows.begin() + static_cast<std::ptrdiff_t>(at),
                 rows.begin() + static_cast<std::ptrdiff_t>(at + w.row_values));
      out.insert(out.end(), size_of(w.c.gap), 0x7E00);
    }
    return out;
  }

  DeviceArray<std::uint16_t> k_, v_, blocks_;
  DeviceArray<std::int32_t> row_start_, lengths_;
  test::DeviceIds page_table_, block_table_;
  DeviceArray<std::uint8_t> pages_;
  std::size_t size_, offset_;
  cuda::AppendArgs args_;
};

bool run_case(const Case& c, bool quick) {
  World world(c);
  OnDevice device(world);
  const std::vector<std::uint8_t> before = world.pages;
  device.append();
  world.append_on_host();
  const std::vector<std::uint8_t> pages = device.pages();
  std::size_t changed = 0;
  std::size_t different = 0;
  std::size_t fields = 0;
  for (std::size_t i = 0; i < pages.size(); ++i) {
    changed += static_cast<std::size_t>(world.pages[i] != before[i]);
    if (pages[i] == world.pages[i]) continue;
    ++different;
    const unsigned bits = static_cast<unsigned>(pages[i]) ^ static_cast<unsigned>(world.pages[i]);
    fields += size_of(std::popcount((bits | bits >> 1) & 0x55U));
  }
  const bool exact = device.blocks() == world.blocks;
  bool same = true;  // an append of the same rows changes nothing
  for (int i = 0; i < (quick ? 1 : 25) && same; ++i) {
    device.append();
    same = device.pages() == pages;
  }
  const bool good = different == 0 && exact && same && (changed > 0 || world.n_rows < 2);
  std::printf("%-40s %6d rows  %9zu bytes changed, %zu differ (%zu fields)  exact rows %s  repeats %s  %s\n", c.name,
              world.n_rows, changed, different, fields, exact ? "equal" : "DIFFER", same ? "equal" : "DIFFER",
              good ? "ok" : "FAILED");
  std::fflush(stdout);
  return good;
}

std::vector<Case> cases(bool quick) {
  std::vector<std::int32_t> batch17 = {1, 63, 64, 65, 319, 320, 321, 20000, 0, 97, 4096, 77, 131072, 0, 385, 1000, 513};
  std::vector<std::int32_t> ragged = {1, 0, 16, 17, 80, 1023, 20005, 321, 64, 131072};
  std::vector<int> counts = {1, 0, 16, 3, 63, 139, 8, 2, 0, 5};
  std::vector<Case> list = {{"D 128, one row", 2, 128, {700}, {}},
                            {"D 256, five rows", 2, 256, {3, 700, 64, 65, 90}, {}},
                            {"D 64, two rows", 3, 64, {17, 130}, {}},
                            {"D 128, batch 17", 3, 128, batch17, {}},
                            {"D 64, batch 17, partly turned", 3, 64, batch17, {}, true, 24},
                            {"D 256, batch 17", 2, 256, batch17, {}},
                            {"D 128, ragged chunks", 2, 128, ragged, counts, true, 8},
                            {"D 64, ragged chunks, no mean", 2, 64, ragged, counts, false},
                            {"D 256, ragged chunks, short ring", 1, 256, ragged, counts, true, 0, 0, 16, 2},
                            {"D 128, drafts of 8", 1, 128, {8, 9, 15, 16, 17, 30, 64, 71}, std::vector<int>(8, 8)}};
  const auto add_wide = [&](const char* name, test::Wide wide) {
    list.push_back({name, 1, 64, batch17, {}});
    list.back().wide = wide;
  };
  add_wide("D 64, page ids of 64 bits", test::Wide::pages);
  add_wide("D 64, block ids of 64 bits", test::Wide::blocks);
  const auto add_int2 = [&](const char* name, int heads, int dim, std::vector<std::int32_t> lengths, std::vector<int> rows,
                            Kind kind = Kind::int2, bool means = true) {
    list.push_back({name, heads, dim, std::move(lengths), std::move(rows), means});
    list.back().kind = kind;
  };
  add_int2("int2, D 128, two rows", 2, 128, {700, 64}, {});
  add_int2("int2, D 128, batch 17, one rotation", 2, 128, batch17, {}, Kind::int2, false);
  add_int2("int2, D 64, ragged chunks", 2, 64, ragged, counts);
  add_int2("int2, D 64, three rows, not rotated", 1, 64, {17, 130, 5}, {}, Kind::int2_unrotated);
  add_int2("int2, D 64, batch 17, not rotated", 2, 64, batch17, {}, Kind::int2_unrotated, false);
  add_int2("int2, D 128, ragged, constant means", 1, 128, ragged, counts, Kind::int2_constant_means);
  add_int2("int2, D 256, batch 17, partly turned", 1, 256, batch17, {});
  if (quick) return list;
  std::vector<std::int32_t> batch256;
  for (int i = 0; i < 256; ++i) batch256.push_back(i % 19 == 0 ? 0 : 1 + i * 37 % 5000);
  list.push_back({"D 128, batch 256, 8 heads", 8, 128, batch256, {}});
  list.push_back({"D 128, a chunk of 4096", 8, 128, {4096}, {4096}});
  list.push_back({"D 128, a chunk of 2049 from 30000 on", 8, 128, {32049}, {2049}});
  list.push_back({"D 64, a chunk of 3000", 8, 64, {3000}, {3000}});
  list.push_back({"D 256, a chunk of 1500", 4, 256, {2000}, {1500}});
  list.push_back({"D 128, 40 sequences of 33", 4, 128, std::vector<std::int32_t>(40, 90), std::vector<int>(40, 33)});
  add_int2("int2, D 128, batch 256, 8 heads", 8, 128, batch256, {});
  add_int2("int2, D 128, a chunk of 2049 from 30000 on", 8, 128, {32049}, {2049});
  list.push_back({"D 128, pages past 2^32 bytes", 4, 128, {3000, 2000}, {100, 1}, true, 0, 5'000'000'000});
  return list;
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::string_view(argv[1]) == "--quick";
  int failed = 0;
  try {
    for (const Case& c : cases(quick)) failed += static_cast<int>(!run_case(c, quick));
  } catch (const std::exception& e) {
    std::fprintf(stderr, "append_check: error: %s\n", e.what());
    return 1;
  }
  std::printf("%s\n", failed == 0 ? "all cases have the codec's bytes" : "SOME CASES FAILED");
  return failed == 0 ? 0 : 1;
}
