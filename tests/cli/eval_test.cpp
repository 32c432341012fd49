// The parts of `oscar eval` that need no model: depth bins, samples, documents, kept results.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "depth_bins.h"
#include "eval_report.h"
#include "oscar/base/error.h"
#include "result_store.h"
#include "retrieval.h"
#include "statistics.h"
#include "vocabulary.h"

namespace oscar::cli {
namespace {

std::vector<std::string> labels(int from, int end, int minimum) {
  std::vector<std::string> out;
  int next = from;
  for (const DepthBin& bin : depth_bins(from, end, minimum)) {
    EXPECT_EQ(bin.first, next);  // no gap, no overlap
    next = bin.end;
    out.push_back(bin.label());
  }
  EXPECT_EQ(next, end);
  return out;
}

TEST(DepthBins, CutAtPowersOfTwo) {
  using Labels = std::vector<std::string>;
  EXPECT_EQ(labels(1024, 4095, 512), (Labels{"1024-2047", "2048-4094"}));
  EXPECT_EQ(labels(1024, 8191, 512), (Labels{"1024-2047", "2048-4095", "4096-8190"}));
  EXPECT_EQ(labels(0, 5, 1), (Labels{"0-0", "1-1", "2-3", "4-4"}));
}

TEST(DepthBins, JoinWhatIsTooSmall) {
  using Labels = std::vector<std::string>;
  EXPECT_EQ(labels(768, 1535, 512), (Labels{"768-1534"}));    // 256 below, joined upwards
  EXPECT_EQ(labels(1024, 2303, 512), (Labels{"1024-2302"}));  // 255 above, joined downwards
  EXPECT_EQ(labels(1000, 4096, 512), (Labels{"1000-2047", "2048-4095"}));
  EXPECT_EQ(labels(10, 20, 512), (Labels{"10-19"}));
  EXPECT_THROW(depth_bins(20, 20, 1), Error);
}

TEST(Statistics, WilsonInterval) {
  // R: prop.test(7, 20, correct = FALSE)$conf.int
  const Estimate e = share_of(7, 20);
  EXPECT_DOUBLE_EQ(e.value, 0.35);
  EXPECT_NEAR(e.low, 0.1811918, 1e-6);
  EXPECT_NEAR(e.high, 0.5671457, 1e-6);
  EXPECT_EQ(share_of(0, 10).low, 0);
  EXPECT_GT(share_of(0, 10).high, 0.2);
  EXPECT_EQ(share_of(10, 10).high, 1);
  EXPECT_THROW(share_of(0, 0), Error);
}

// Sequences that differ as wholes, with nothing varying inside: blocks within them would claim more than was seen.
TEST(Statistics, WholeSequencesAreDrawn) {
  std::vector<std::vector<Difference>> sequences;
  for (int s = 0; s < 4; ++s) sequences.emplace_back(640, Difference{s == 3 ? 1.0 : 0.0, 1, 1, true});
  const Estimate whole = summarise(sequences, 1, 0).kl_mean, blocks = summarise(sequences, 1).kl_mean;
  EXPECT_DOUBLE_EQ(whole.value, 0.25);
  EXPECT_DOUBLE_EQ(whole.low, 0);
  EXPECT_GE(whole.high, 0.5);
  EXPECT_LT(blocks.high - blocks.low, 0.5 * (whole.high - whole.low));
}

MethodResult result_of(const std::string& name, std::vector<std::vector<Difference>> sequences) {
  MethodResult r;
  r.name = name;
  r.sequences = std::move(sequences);
  return r;
}

TEST(Report, RowsByDepth) {
  EvalFrame frame;
  frame.n_ctx = 4096;
  frame.from = 1024;
  std::vector<Difference> sequence;
  for (int p = 1024; p < 4095; ++p) sequence.push_back({p < 2048 ? 0.1 : 0.3, 2, 2, p < 2048});
  const auto rows = kl_rows({result_of("exact", {}), result_of("x", {sequence})}, frame);
  ASSERT_EQ(rows.size(), 3U);
  EXPECT_EQ(rows[0]["depth"], "1024-2047");
  EXPECT_NEAR(rows[0]["kl_mean"].get<double>(), 0.1, 1e-12);
  EXPECT_EQ(rows[0]["positions"], 1024);
  EXPECT_EQ(rows[0]["same_top"], 1.0);
  EXPECT_NEAR(rows[1]["kl_mean"].get<double>(), 0.3, 1e-12);
  EXPECT_EQ(rows[1]["same_top"], 0.0);
  EXPECT_EQ(rows[2]["depth"], "all");
  EXPECT_EQ(rows[2]["positions"], 3071);
  EXPECT_NEAR(rows[2]["kl_mean"].get<double>(), (0.1 * 1024 + 0.3 * 2047) / 3071, 1e-12);
}

TEST(Report, SmallSamplesMakeNoClaim) {
  EXPECT_THROW(check_sample(kLeastPositions - 1), Error);
  EXPECT_NO_THROW(check_sample(kLeastPositions));
  EvalFrame frame;
  frame.continuation_tokens = 64;
  MethodResult r;
  r.equal_tokens.assign(kLeastQuestions - 1, 16);
  EXPECT_TRUE(continuation_rows({r}, frame).empty());
  r.equal_tokens.push_back(64);
  const auto rows = continuation_rows({r}, frame);
  ASSERT_EQ(rows.size(), 4U);  // 8, 16, 32, 64 tokens
  EXPECT_EQ(rows[1]["same"], 1.0);
  EXPECT_DOUBLE_EQ(rows[2]["same"].get<double>(), 1.0 / kLeastQuestions);
  EXPECT_DOUBLE_EQ(rows[2]["equal_prefix"].get<double>(), (0.5 * (kLeastQuestions - 1) + 1) / kLeastQuestions);
}

TEST(Report, RetrievalCountsHitsAndAgreement) {
  EvalFrame frame;
  frame.questions.emplace_back();
  MethodResult base, other;
  base.documents.emplace_back();
  other.documents.emplace_back();
  for (int q = 0; q < 20; ++q) {  // right: 1. exact is right on all but the last, the other on the first half
    frame.questions[0].push_back({"needle", q % kNeedleDepths, 1, 4});
    base.documents[0].push_back({q == 19 ? 2 : 1, 0.5});
    other.documents[0].push_back({q < 10 ? 1 : 2, 0.25});
  }
  frame.questions[0].push_back({"lookup", -1, 0, 4});
  base.documents[0].push_back({0, 1});
  other.documents[0].push_back({0, 1});
  const auto rows = retrieval_rows({base, other}, frame);
  ASSERT_EQ(rows.size(), 4U);  // needle and all; one lookup is no sample
  EXPECT_EQ(rows[0]["kind"], "needle");
  EXPECT_DOUBLE_EQ(rows[0]["accuracy"].get<double>(), 0.95);
  EXPECT_EQ(rows[0]["same_choice"], 1.0);
  EXPECT_EQ(rows[2]["kind"], "needle");
  EXPECT_DOUBLE_EQ(rows[2]["accuracy"].get<double>(), 0.5);
  EXPECT_DOUBLE_EQ(rows[2]["same_choice"].get<double>(), 11.0 / 20);
  EXPECT_DOUBLE_EQ(rows[2]["chance"].get<double>(), 0.25);
  // Questions 0..9 were found and 10..19 not: half at every depth.
  EXPECT_EQ(rows[2]["accuracy_by_depth"], nlohmann::ordered_json(std::vector<double>(kNeedleDepths, 0.5)));
  EXPECT_EQ(rows[3]["questions"], 21);
}

TEST(Report, ToolsCountChoicesAndAnswers) {
  EvalFrame frame;
  frame.calls.emplace_back();
  frame.answers = true;
  MethodResult base, other;
  base.name = "exact";
  other.name = "x";
  base.chats.emplace_back();
  other.chats.emplace_back();
  for (int i = 0; i < 20;
       ++i) {  // exact is always right; the other calls the right function, with the right code half of the time
    frame.calls[0].push_back({2, 8, 1, 6});
    base.chats[0].push_back({{2, 0.9}, {1, 0.8}, {5, 6}, true, true, true});
    const bool right = i % 2 == 0;
    other.chats[0].push_back({{2, 0.5}, {right ? 1 : 0, 0.25}, {5, right ? 6 : 7}, i < 15, i < 12, right});
  }
  const auto rows = tool_rows({base, other}, frame);
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_EQ(rows[0]["call_right"], 1.0);
  EXPECT_EQ(rows[0]["same_answer"], 1.0);
  const auto& row = rows[1];
  EXPECT_EQ(row["requests"], 20);
  EXPECT_EQ(row["function_accuracy"], 1.0);
  EXPECT_DOUBLE_EQ(row["function_chance"].get<double>(), 1.0 / 8);
  EXPECT_DOUBLE_EQ(row["function_probability"].get<double>(), 0.5);
  EXPECT_EQ(row["argument_accuracy"], 0.5);
  EXPECT_EQ(row["same_argument"], 0.5);
  EXPECT_EQ(row["same_function"], 1.0);
  EXPECT_EQ(row["json_valid"], 0.75);
  EXPECT_EQ(row["call_valid"], 0.6);
  EXPECT_EQ(row["call_right"], 0.5);
  EXPECT_EQ(row["same_answer"], 0.5);
  EXPECT_LT(row["json_valid_ci"][0], 0.75);
  frame.answers = false;
  EXPECT_FALSE(tool_rows({base, other}, frame)[1].contains("json_valid"));
  frame.calls[0].pop_back();
  EXPECT_TRUE(tool_rows({base, other}, frame).empty());  // 19 are no sample
}

// One token per word and separator, so that positions can be read off; the vocabulary grows as words are seen.
class Words : public Vocabulary {
 public:
  Tokens operator()(const std::string& text) {
    Tokens out;
    for (std::size_t begin = 0; begin < text.size();) {
      std::size_t end = text.find_first_of(" \n.:,", begin + 1);
      end = std::min(end, text.size());
      const std::string word = text.substr(begin, end - begin);
      out.push_back(id(word));
      begin = end;
    }
    return out;
  }
};

DocumentPlan plan_of(int tokens) {
  DocumentPlan plan;
  plan.tokens = tokens;
  plan.first = 64;
  plan.last = tokens - 256;
  return plan;
}

const char* const kFiller = "The rain fell on the hills. Nobody came to the door! Was it late? The clock said nothing.\n";

TEST(Retrieval, DocumentsHoldEveryFactInPlace) {
  Words words;
  const Document d = make_document(
      kFiller, [&](const std::string& t) { return words(t); }, plan_of(2000));
  EXPECT_EQ(d.tokens.size(), 2000U);
  EXPECT_EQ(d.questions.size(), 30U);
  const std::string middle = words.text({d.tokens.begin() + 64, d.tokens.begin() + 2000 - 256});
  std::map<std::string, int> kinds;
  int last_depth = -1;
  std::size_t last_place = 0;
  for (const Question& q : d.questions) {
    ++kinds[q.kind];
    const std::string answer = words.text(q.candidates.at(static_cast<std::size_t>(q.right)));
    std::set<std::string> distinct;
    for (const Tokens& c : q.candidates) {
      distinct.insert(words.text(c));
      EXPECT_NE(middle.find(words.text(c)), std::string::npos);  // every candidate is in the document
    }
    EXPECT_EQ(distinct.size(), 6U);
    const std::string ask = words.text(q.ask);
    if (q.kind == "needle") {
      const std::string fact = " The" + ask.substr(ask.find("the secret") + 3) + answer + ".";
      const std::size_t place = middle.find(fact);
      ASSERT_NE(place, std::string::npos) << fact;
      if (q.depth > last_depth) {
        EXPECT_GT(place, last_place);
      }
      last_place = place;
      last_depth = q.depth;
    } else if (q.kind == "lookup") {
      EXPECT_NE(middle.find(ask.substr(ask.rfind('\n')) + answer + "\n"), std::string::npos);
    } else {
      const std::string person = ask.substr(ask.rfind("where ") + 6, ask.rfind(" lives is") - ask.rfind("where ") - 6);
      const std::size_t home = middle.find(" " + person + " lives in the town of ");
      ASSERT_NE(home, std::string::npos) << person;
      const std::size_t name = home + person.size() + 23;
      const std::string town = middle.substr(name, middle.find('.', name) - name);
      EXPECT_NE(middle.find(" town of " + town + " is" + answer + "."), std::string::npos) << person << " " << town << answer;
    }
  }
  EXPECT_EQ(kinds, (std::map<std::string, int>{{"needle", 10}, {"two-facts", 10}, {"lookup", 10}}));
}

TEST(Retrieval, SeedsDecide) {
  Words words;
  const auto tokenize = [&](const std::string& t) { return words(t); };
  DocumentPlan plan = plan_of(2000);
  const Document a = make_document(kFiller, tokenize, plan), b = make_document(kFiller, tokenize, plan);
  plan.seed = 2;
  const Document c = make_document(kFiller, tokenize, plan);
  EXPECT_EQ(a.tokens, b.tokens);
  EXPECT_NE(a.tokens, c.tokens);
  // Answers in the same slot could be guessed.
  std::set<int> slots;
  for (const Question& q : a.questions) slots.insert(q.right);
  EXPECT_GE(slots.size(), 4U);
}

TEST(Retrieval, ImpossiblePlansAreRefused) {
  Words words;
  const auto tokenize = [&](const std::string& t) { return words(t); };
  EXPECT_THROW(make_document(kFiller, tokenize, plan_of(420)), Error);
  EXPECT_THROW(make_document(kFiller, tokenize, plan_of(300)), Error);
  EXPECT_THROW(make_document("\n \n", tokenize, plan_of(2000)), Error);
  DocumentPlan plan = plan_of(2000);
  plan.candidates = 1;
  EXPECT_THROW(make_document(kFiller, tokenize, plan), Error);
}

TEST(ResultStore, KeepsByTheWholeKey) {
  const auto folder = std::filesystem::path(testing::TempDir()) / "oscar-eval-store";
  std::filesystem::remove_all(folder);
  const ResultStore store(folder, false);
  const nlohmann::json key{{"method", "a"}, {"n", 1}}, other{{"method", "a"}, {"n", 2}};
  EXPECT_FALSE(store.find(key));
  const nlohmann::json value{{"kl", {0.1, 1e-300, 0.30000000000000004}}};
  store.put(key, value);
  ASSERT_TRUE(store.find(key));
  EXPECT_EQ(*store.find(key), value);  // doubles survive bit for bit
  EXPECT_FALSE(store.find(other));
  EXPECT_FALSE(ResultStore(folder, true).find(key));
  // A file cut short counts as absent.
  for (const auto& file : std::filesystem::directory_iterator(folder)) std::filesystem::resize_file(file.path(), 20);
  EXPECT_FALSE(store.find(key));
  store.put(key, value);
  EXPECT_TRUE(store.find(key));
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace oscar::cli
