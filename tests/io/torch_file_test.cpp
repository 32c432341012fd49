// Everything that can be checked without torch; tests/torch compares with torch itself.
#include "oscar/io/torch_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "io/torch_builder.h"

namespace oscar {
namespace {

using test::error_of;
using test::floats;
using test::Pickle;
using test::Scratch;
using test::write_torch_zip;
using test::write_zip;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

std::vector<float> values_of(const TorchValue& value) {
  const auto& tensor = *std::get<std::shared_ptr<TorchTensor>>(value.data);
  std::vector<float> values(tensor.bytes.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
  return values;
}

TorchValue read_pickle(const std::string& pickle, const std::vector<std::string>& storages = {}) {
  const Scratch scratch;
  return read_torch(write_torch_zip(scratch, pickle, storages));
}

std::string error_for(const std::string& pickle, const std::vector<std::string>& storages = {}) {
  const std::string error = error_of([&] { read_pickle(pickle, storages); });
  EXPECT_THAT(error, HasSubstr("file.pt"));
  return error;
}

TEST(TorchFile, DataOpcodes) {
  Pickle pickle;
  pickle.raw("](").raw("N\x88\x89").raw("K\x07").raw(std::string_view("M\x01\x02", 3)).integer(-3);
  pickle.raw(std::string_view("\x8a\x05\x00\x00\x00\x00\xff", 7)).raw(std::string_view("\x8a\x00", 2));  // -2^32, 0
  pickle.raw(std::string_view("G\x3f\xf8\x00\x00\x00\x00\x00\x00", 9)).text("word").raw("q\x01h\x01");   // 1.5
  pickle.raw(")")
      .raw("K\x01\x85")
      .raw("K\x01K\x02\x86")
      .raw("K\x01K\x02K\x03\x87")
      .raw(
          "]K\x05"
          "a");
  const TorchValue value = read_pickle(pickle.raw("e").stop());
  const auto& list = *std::get<std::shared_ptr<TorchList>>(value.data);
  ASSERT_EQ(list.size(), 16U);
  EXPECT_TRUE(std::holds_alternative<std::monostate>(list[0].data));
  EXPECT_EQ(std::get<bool>(list[1].data), true);
  EXPECT_EQ(std::get<bool>(list[2].data), false);
  const std::vector<std::int64_t> integers = {7, 513, -3, -(std::int64_t{1} << 32), 0};
  for (std::size_t i = 0; i < integers.size(); ++i) EXPECT_EQ(std::get<std::int64_t>(list[3 + i].data), integers[i]);
  EXPECT_EQ(std::get<double>(list[8].data), 1.5);
  EXPECT_EQ(std::get<std::string>(list[10].data), "word");
  for (std::size_t n = 0; n < 4; ++n) EXPECT_EQ(std::get<std::shared_ptr<TorchList>>(list[11 + n].data)->size(), n);
  EXPECT_EQ(std::get<std::int64_t>(std::get<std::shared_ptr<TorchList>>(list[15].data)->at(0).data), 5);
}

TEST(TorchFile, A14TransposedOffsetAndSharedStorage) {
  Pickle pickle;
  pickle.raw("](").tensor({.numel = 6, .shape = {3, 2}, .strides = {1, 3}});  // the transpose of [[0 1 2] [3 4 5]]
  pickle.tensor({.numel = 6, .offset = 2, .shape = {2}, .strides = {3}})
      .tensor({.numel = 6, .shape = {2, 1, 3}, .strides = {3, 99, 1}});
  pickle.tensor({.numel = 6, .offset = 5, .shape = {}, .strides = {}}).tensor({.numel = 6, .shape = {0, 4}, .strides = {4, 1}});
  pickle.tensor({.numel = 6, .offset = 1, .shape = {2, 2}, .strides = {0, 1}});  // expanded: rows repeat
  const TorchValue value = read_pickle(pickle.raw("e").stop(), {floats({0, 1, 2, 3, 4, 5})});
  const auto& list = *std::get<std::shared_ptr<TorchList>>(value.data);
  EXPECT_THAT(values_of(list.at(0)), ElementsAre(0, 3, 1, 4, 2, 5));
  EXPECT_THAT(values_of(list.at(1)), ElementsAre(2, 5));
  EXPECT_THAT(values_of(list.at(2)), ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_THAT(values_of(list.at(3)), ElementsAre(5));
  EXPECT_THAT(values_of(list.at(4)), ElementsAre());
  EXPECT_THAT(values_of(list.at(5)), ElementsAre(1, 2, 1, 2));
}

TEST(TorchFile, A15SizesBeyondTheStorage) {
  const std::vector<std::string> storage = {floats({0, 1, 2, 3, 4, 5})};
  const std::vector<Pickle::View> views = {
      {.numel = 6, .shape = {7}, .strides = {1}},
      {.numel = 6, .shape = {2, 3}, .strides = {4, 1}},
      {.numel = 6, .offset = 5, .shape = {2}, .strides = {1}},
      {.numel = 6, .offset = 6, .shape = {1}, .strides = {1}},
      {.numel = 6, .offset = -1, .shape = {1}, .strides = {1}},
      {.numel = 6, .shape = {2}, .strides = {-1}},
      {.numel = 6, .shape = {-2}, .strides = {1}},
      {.numel = 6, .shape = {2}, .strides = {1, 1}},
      {.numel = 6, .shape = {2, 2}, .strides = {2147483647, 2147483647}},
      {.numel = 6, .shape = {2147483647, 2147483647, 2147483647}, .strides = {0, 0, 0}},
      {.numel = 6, .shape = {65536, 65536}, .strides = {0, 0}},  // would expand 24 bytes to 16 GiB
      {.numel = 7, .shape = {7}, .strides = {1}},                // the entry has six
      {.numel = 5, .shape = {5}, .strides = {1}},
      {.numel = -1, .shape = {1}, .strides = {1}},
      {.key = "9", .numel = 6, .shape = {6}, .strides = {1}},
      {.key = "../version", .numel = 6, .shape = {6}, .strides = {1}},
  };
  for (std::size_t i = 0; i < views.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_THAT(error_for(Pickle().tensor(views[i]).stop(), storage), AllOf(HasSubstr("opcode"), HasSubstr("offset")));
  }
}

TEST(TorchFile, A16DtypesAndMemoPatterns) {
  const std::vector<std::pair<const char*, const char*>> known = {
      {"FloatStorage", "F32"}, {"DoubleStorage", "F64"}, {"HalfStorage", "F16"},  {"BFloat16Storage", "BF16"},
      {"LongStorage", "I64"},  {"IntStorage", "I32"},    {"ShortStorage", "I16"}, {"CharStorage", "I8"},
      {"ByteStorage", "U8"},   {"BoolStorage", "BOOL"}};
  for (const auto& [storage, dtype] : known) {
    const std::size_t element = std::string_view(dtype).ends_with("64")   ? 8
                                : std::string_view(dtype).ends_with("32") ? 4
                                : std::string_view(dtype).ends_with("16") ? 2
                                                                          : 1;
    const TorchValue value = read_pickle(Pickle().tensor({.storage = storage, .numel = 2, .shape = {2}, .strides = {1}}).stop(),
                                         {std::string(2 * element, '\1')});
    EXPECT_EQ(std::get<std::shared_ptr<TorchTensor>>(value.data)->dtype, dtype);
  }
  for (const char* storage : {"ComplexFloatStorage", "QInt8Storage", "UntypedStorage"}) {
    EXPECT_THAT(error_for(Pickle().tensor({.storage = storage}).stop()),
                AllOf(HasSubstr("dtype not supported"), HasSubstr(storage)));
  }
  // One tensor reached twice through the memo is one tensor.
  const Pickle::View view{.numel = 1, .shape = {1}, .strides = {1}};
  const TorchValue twice = read_pickle(Pickle()
                                           .raw("](")
                                           .tensor(view)
                                           .raw("q\x05h\x05"
                                                "e")
                                           .stop(),
                                       {floats({3})});
  const auto& list = *std::get<std::shared_ptr<TorchList>>(twice.data);
  EXPECT_EQ(std::get<std::shared_ptr<TorchTensor>>(list.at(0).data), std::get<std::shared_ptr<TorchTensor>>(list.at(1).data));
}

TEST(TorchFile, A17NotAPickleTruncatedOrOtherProtocols) {
  EXPECT_THAT(error_for("yes"), AllOf(HasSubstr("opcode 121"), HasSubstr("offset 0")));
  EXPECT_THAT(error_for(""), HasSubstr("empty"));
  for (const int protocol : {0, 1, 3, 4, 5, 255}) {
    EXPECT_THAT(error_for(Pickle(protocol).raw("N").stop()),
                AllOf(HasSubstr(fmt::format("protocol {}", protocol)), HasSubstr("opcode 128"), HasSubstr("offset 0")));
  }
  EXPECT_THAT(error_for(Pickle().raw("N").raw("y").stop()), AllOf(HasSubstr("opcode 121"), HasSubstr("offset 3")));
  EXPECT_THAT(error_for(Pickle().raw("\x94").stop()), AllOf(HasSubstr("MEMOIZE"), HasSubstr("offset 2")));
  EXPECT_THAT(error_for(Pickle().raw("]}b").stop()), AllOf(HasSubstr("BUILD"), HasSubstr("offset 4")));
  EXPECT_THAT(error_for(Pickle().raw("N").open()), AllOf(HasSubstr("truncated"), HasSubstr("offset 3")));
  EXPECT_THAT(error_for(Pickle().raw(std::string_view("X\xff\xff\xff\x7f", 5)).stop()),
              AllOf(HasSubstr("truncated"), HasSubstr("opcode 88")));
  EXPECT_THAT(error_for(Pickle().raw("N").stop() + "N"), HasSubstr("bytes follow"));
  EXPECT_THAT(error_for(Pickle().raw("NN").stop()), HasSubstr("unbalanced"));
  EXPECT_THAT(error_for(Pickle().raw("(N").stop()), HasSubstr("unbalanced"));
  EXPECT_THAT(error_for(Pickle().stop()), HasSubstr("unbalanced"));
  EXPECT_THAT(error_for(Pickle().raw("h\x07").stop()), HasSubstr("memo slot 7"));
  EXPECT_THAT(error_for(Pickle().raw("q\x07").stop()), HasSubstr("stack is empty"));
  EXPECT_THAT(error_for(Pickle().raw("t").stop()), HasSubstr("no MARK"));
  EXPECT_THAT(error_for(Pickle().raw("N\x86").stop()), HasSubstr("stack is empty"));
  EXPECT_THAT(error_for(Pickle().raw("}(Nu").stop()), HasSubstr("no value"));
  EXPECT_THAT(error_for(Pickle().raw("](NNu").stop()), HasSubstr("not a dict"));
  EXPECT_THAT(error_for(Pickle().raw("}(Ne").stop()), HasSubstr("not a list"));
  EXPECT_THAT(error_for(Pickle().raw("}(NNu").stop()), HasSubstr("dict key"));
  EXPECT_THAT(error_for(Pickle().raw("}(K\x01NK\x01Nu").stop()), HasSubstr("'1' twice"));
  EXPECT_THAT(error_for(Pickle().raw(std::string_view("\x8a\x09\0\0\0\0\0\0\0\0\1", 11)).stop()), HasSubstr("64 bits"));
  const Scratch scratch;
  EXPECT_THAT(error_of([&] {
                read_torch(scratch.write("legacy.pt", std::string_view("\x80\x02\x8a\nl\xfc\x9c\x46\xf9 j\xa8P\x19.", 16)));
              }),
              AllOf(HasSubstr("legacy"), HasSubstr("opcode 128"), HasSubstr("offset 0")));
  EXPECT_THAT(error_of([&] { read_torch(scratch.write("text.pt", "yes, this is text")); }),
              AllOf(HasSubstr("opcode 121"), HasSubstr("offset 0")));
  EXPECT_THAT(error_of([&] { read_torch(scratch.write("short.pt", "PK")); }), HasSubstr("too short"));
}

TEST(TorchFile, OnlyTheAllowListIsBuilt) {
  for (const char* global :
       {"os\nsystem\n", "builtins\neval\n", "torch\nload\n", "torch._utils\n_rebuild_parameter\n", "collections\ndeque\n"}) {
    EXPECT_THAT(error_for(Pickle().raw(std::string("c") + global).text("x").raw("\x85R").stop()),
                AllOf(HasSubstr("refused"), HasSubstr("opcode 99"), HasSubstr("offset 2")));
  }
  EXPECT_THAT(error_for(Pickle().raw("ctorch\nFloatStorage\n)R").stop()), HasSubstr("nothing else is called"));
  EXPECT_THAT(error_for(Pickle().raw("ctorch\nFloatStorage\n").stop()), HasSubstr("class or a bare storage"));
  EXPECT_THAT(error_for(Pickle().raw("ctorch._utils\n_rebuild_tensor_v2\n)R").stop()), HasSubstr("malformed"));
  EXPECT_THAT(error_for(Pickle().text("x").raw("Q").stop()), HasSubstr("not a torch storage"));
  EXPECT_THAT(error_for(Pickle().raw("NNR").stop()), HasSubstr("not a tuple"));
}

TEST(TorchFile, HostileStructuresStayBounded) {
  EXPECT_THAT(error_for(Pickle()
                            .raw("]q\x01h\x01"
                                 "a")
                            .stop()),
              HasSubstr("contains itself"));
  EXPECT_THAT(error_for(Pickle().raw("}q\x01K\x01h\x01s").stop()), HasSubstr("contains itself"));
  std::string deep;
  for (int i = 0; i < 1000; ++i) deep += "](";
  for (int i = 0; i < 1000; ++i) deep += 'e';
  EXPECT_THAT(error_for(Pickle().raw(deep).stop()), HasSubstr("nested deeper"));
  Pickle repeated;  // one long text a thousand times through the memo
  repeated.raw("](").text(std::string(1 << 17, 'x')).raw("q\x01");
  for (int i = 0; i < 1000; ++i) repeated.raw("h\x01");
  EXPECT_THAT(error_for(repeated.raw("e").stop()), HasSubstr("too much text"));
  EXPECT_THAT(error_for(Pickle().raw(std::string((1 << 20) + 1, ')')).stop()), HasSubstr("more than"));
  // Pairs of pairs: a few hundred bytes that would be 2^41 values if sharing were lost.
  Pickle doubling;
  doubling.raw("(]q\x01");
  for (int i = 0; i < 40; ++i) doubling.raw("h\x01h\x01\x86q\x01");
  const TorchValue value = read_pickle(doubling.raw("t").stop());
  const auto& levels = *std::get<std::shared_ptr<TorchList>>(value.data);
  ASSERT_EQ(levels.size(), 41U);
  EXPECT_EQ(std::get<std::shared_ptr<TorchList>>(std::get<std::shared_ptr<TorchList>>(levels[40].data)->at(1).data),
            std::get<std::shared_ptr<TorchList>>(levels[39].data));
}

TEST(TorchFile, A19ZipVariants) {
  const Scratch scratch;
  const std::string pickle = Pickle().tensor({.numel = 2, .shape = {2}, .strides = {1}}).stop();
  const std::string storage = floats({1, -2});
  const auto with = [&](std::vector<std::pair<std::string, std::string>> extra) {
    extra.insert(extra.begin(), {{"data.pkl", pickle}, {"data/0", storage}});
    return write_zip(scratch, extra, {.root = "k_rotation"});
  };
  EXPECT_THAT(
      values_of(read_torch(with({{"byteorder", "little"}, {".data/serialization_id", "123"}, {".format_version", "1"}}))),
      ElementsAre(1, -2));
  std::string swapped = storage;
  for (std::size_t i = 0; i < swapped.size(); i += 4)
    std::reverse(swapped.begin() + static_cast<long>(i), swapped.begin() + static_cast<long>(i) + 4);
  const auto big = write_zip(scratch, {{"data.pkl", pickle}, {"data/0", swapped}, {"byteorder", "big"}});
  EXPECT_THAT(values_of(read_torch(big)), ElementsAre(1, -2));
  EXPECT_THAT(error_of([&] { read_torch(with({{"byteorder", "pdp"}})); }), HasSubstr("byte order 'pdp'"));
  EXPECT_THAT(error_of([&] { read_torch(with({{"deeper/data.pkl", pickle}})); }), HasSubstr("two data.pkl"));
  EXPECT_THAT(error_of([&] { read_torch(write_zip(scratch, {{"readme", "text"}})); }), HasSubstr("no data.pkl"));
  const std::string compressible = Pickle().text(std::string(1000, 'a')).stop();
  EXPECT_THAT(error_of([&] { read_torch(write_torch_zip(scratch, compressible, {}, {.method = ZIP_CM_DEFLATE})); }),
              HasSubstr("compressed"));

  const std::string whole = test::slurp(with({}));
  const std::size_t directory = whole.find("PK\x01\x02");
  ASSERT_NE(directory, std::string::npos);
  EXPECT_THAT(error_of([&] { read_torch(scratch.write("cut.pt", whole.substr(0, directory))); }),
              HasSubstr("not a whole zip file"));
  EXPECT_THAT(error_of([&] { read_torch(scratch.write("cut.pt", whole.substr(0, whole.size() / 2))); }),
              HasSubstr("not a whole zip file"));
  std::string damaged = whole;
  damaged[whole.find(storage)] ^= 1;  // the checksum tells
  EXPECT_THAT(error_of([&] { read_torch(scratch.write("bad.pt", damaged)); }), HasSubstr("corrupt"));
}

TorchValue tensor_value(const std::string& dtype, std::vector<std::int64_t> shape, std::size_t bytes) {
  auto tensor = std::make_shared<TorchTensor>(TorchTensor{dtype, std::move(shape), std::vector<std::byte>(bytes)});
  for (std::size_t i = 0; i < bytes; ++i) tensor->bytes[i] = static_cast<std::byte>(i % 2);
  return {tensor};
}

TorchValue sample() {
  auto inner = std::make_shared<TorchDict>();
  const TorchValue shared = tensor_value("F32", {2, 3}, 24);
  inner->emplace_back(TorchValue{std::int64_t{-7}}, shared);
  inner->emplace_back(TorchValue{std::int64_t{1} << 40}, shared);
  auto list = std::make_shared<TorchList>();
  for (const char* dtype : {"F64", "I64"}) list->push_back(tensor_value(dtype, {3}, 24));
  for (const char* dtype : {"F16", "BF16", "I16"}) list->push_back(tensor_value(dtype, {1, 2}, 4));
  for (const char* dtype : {"I8", "U8", "BOOL"}) list->push_back(tensor_value(dtype, {}, 1));
  list->push_back(tensor_value("I32", {0, 5}, 0));
  for (const double number : {0.5, -1e300}) list->push_back({number});
  list->push_back({true});
  list->push_back({});
  auto top = std::make_shared<TorchDict>();
  top->emplace_back(TorchValue{std::string("layers")}, TorchValue{inner});
  top->emplace_back(TorchValue{std::string("list")}, TorchValue{list});
  return {top};
}

void expect_equal(const TorchValue& a, const TorchValue& b) {
  ASSERT_EQ(a.data.index(), b.data.index());
  if (const auto* tensor = std::get_if<std::shared_ptr<TorchTensor>>(&a.data)) {
    const auto& other = *std::get<std::shared_ptr<TorchTensor>>(b.data);
    EXPECT_EQ((*tensor)->dtype, other.dtype);
    EXPECT_EQ((*tensor)->shape, other.shape);
    EXPECT_EQ((*tensor)->bytes, other.bytes);
  } else if (const auto* list = std::get_if<std::shared_ptr<TorchList>>(&a.data)) {
    const auto& other = *std::get<std::shared_ptr<TorchList>>(b.data);
    ASSERT_EQ((*list)->size(), other.size());
    for (std::size_t i = 0; i < other.size(); ++i) expect_equal((**list)[i], other[i]);
  } else if (const auto* dict = std::get_if<std::shared_ptr<TorchDict>>(&a.data)) {
    const auto& other = *std::get<std::shared_ptr<TorchDict>>(b.data);
    ASSERT_EQ((*dict)->size(), other.size());
    for (std::size_t i = 0; i < other.size(); ++i) {
      expect_equal((**dict)[i].first, other[i].first);
      expect_equal((**dict)[i].second, other[i].second);
    }
  } else {
    EXPECT_TRUE(a.data == b.data);
  }
}

TEST(TorchFile, RoundTripAlignedAndReproducible) {
  const Scratch scratch;
  const TorchValue value = sample();
  write_torch(value, scratch.path("a.pt"));
  expect_equal(read_torch(scratch.path("a.pt")), value);
  write_torch(value, scratch.path("b.pt"));
  const std::string bytes = test::slurp(scratch.path("a.pt"));
  EXPECT_EQ(bytes, test::slurp(scratch.path("b.pt")));
  int entries = 0;
  for (std::size_t at = bytes.find("PK\x03\x04"); at != std::string::npos; at = bytes.find("PK\x03\x04", at + 1), ++entries) {
    std::uint16_t name = 0, extra = 0;
    std::memcpy(&name, bytes.data() + at + 26, 2);
    std::memcpy(&extra, bytes.data() + at + 28, 2);
    EXPECT_EQ((at + 30 + name + extra) % 64, 0U) << bytes.substr(at + 30, name);
  }
  EXPECT_EQ(entries, 3 + 10) << "data.pkl, byteorder, version and ten storages: the shared tensor is stored once";
}

TEST(TorchFile, WriterRefusesWhatTorchCouldNotRead) {
  const Scratch scratch;
  const auto path = scratch.path("x.pt");
  EXPECT_THAT(error_of([&] { write_torch(tensor_value("U64", {1}, 8), path); }), HasSubstr("U64"));
  EXPECT_THAT(error_of([&] { write_torch(tensor_value("F32", {3}, 8), path); }), HasSubstr("shape"));
  EXPECT_THAT(error_of([&] { write_torch(sample(), scratch.path("no/such/x.pt")); }), HasSubstr("cannot write"));
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(TorchFile, DamagedFilesNeverCrash) {
  const Scratch scratch;
  Pickle pickle;
  pickle.raw("}(")
      .text("w")
      .tensor({.numel = 2, .shape = {1, 2}, .strides = {2, 1}})
      .text("n")
      .raw(
          "](NK\x05"
          "eu");
  const auto read = [](const auto& path) { read_torch(path); };
  // The pickle itself, with sound checksums around it.
  int refused = 0;
  const std::string valid = pickle.stop();
  for (std::size_t i = 0; i < valid.size(); ++i) {
    for (const int mask : {0x01, 0x20, 0x80, 0xFF}) {
      std::string bytes = valid;
      bytes[i] = static_cast<char>(bytes[i] ^ mask);
      try {
        read(write_torch_zip(scratch, bytes, {floats({1, 2})}));
      } catch (const Error&) {
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, 300);
  // The zip around it.
  const std::string zip = test::slurp(write_torch_zip(scratch, valid, {floats({1, 2})}));
  const auto counts = test::mutate(scratch, zip, zip.size(), read);
  EXPECT_GT(counts.refused, 1000);
  EXPECT_GT(counts.accepted, 20);
}

}  // namespace
}  // namespace oscar
