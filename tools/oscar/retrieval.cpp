#include "retrieval.h"

#include <algorithm>

#include "oscar/base/error.h"
#include "word_lists.h"

namespace oscar::cli {
namespace {

constexpr std::size_t kMost = kNames;  // needles, persons, questions of a kind
constexpr std::size_t kPairs = 24;

std::vector<std::string> sentences(const std::string& text) {
  std::vector<std::string> out;
  for (std::size_t begin = 0; begin < text.size();) {
    std::size_t end = text.find_first_of(".!?\n", begin);
    end = end == std::string::npos ? text.size() : end + 1;
    std::string sentence = text.substr(begin, end - begin);
    std::replace(sentence.begin(), sentence.end(), '\n', ' ');
    const std::size_t start = sentence.find_first_not_of(' ');
    if (start != std::string::npos) out.push_back(fmt::format(" {}", sentence.substr(start)));
    begin = end;
  }
  return out;
}

std::string random_key(Dice& dice) {
  constexpr std::string_view letters = "bcdfghjkmnpqrstvwxz";
  constexpr std::string_view digits = "23456789";
  return {letters[dice.below(letters.size())], digits[dice.below(digits.size())], letters[dice.below(letters.size())],
          digits[dice.below(digits.size())]};
}

struct Fact {
  int position = 0;
  std::string text;
};

// The right word and others of the same kind, in random order.
void add_candidates(Question& question, const std::vector<std::string>& words, std::size_t right, std::size_t n,
                    const Tokenizer& tokenize, Dice& dice) {
  std::vector<std::size_t> chosen{right};
  for (const std::size_t other : dice.shuffled(words.size())) {
    if (other != right && chosen.size() < n) chosen.push_back(other);
  }
  for (const std::size_t slot : dice.shuffled(chosen.size())) {
    if (slot == 0) question.right = static_cast<int>(question.candidates.size());
    question.candidates.push_back(tokenize(fmt::format(" {}", words[chosen[slot]])));
  }
}

Tokens laid_out(std::vector<Fact> facts, const std::string& filler, const Tokenizer& tokenize, const DocumentPlan& plan) {
  const std::vector<std::string> fill = sentences(filler);
  if (fill.empty()) fail("the text to hide facts in has no sentence");
  std::stable_sort(facts.begin(), facts.end(), [](const Fact& a, const Fact& b) { return a.position < b.position; });
  Tokens out;
  const auto append = [&](const std::string& text) {
    const Tokens tokens = tokenize(text);
    out.insert(out.end(), tokens.begin(), tokens.end());
  };
  std::size_t next = 0;
  for (std::size_t i = 0; static_cast<int>(out.size()) < plan.tokens; ++i) {
    for (; next < facts.size() && static_cast<int>(out.size()) >= facts[next].position; ++next) {
      append(facts[next].text);
      if (static_cast<int>(out.size()) > plan.last)
        fail("{} facts do not fit into a document of {} tokens: use a larger -c", facts.size(), plan.tokens);
    }
    append(fill[i % fill.size()]);  // a short text goes round
  }
  out.resize(static_cast<std::size_t>(plan.tokens));
  return out;
}

}  // namespace

Document make_document(const std::string& filler, const Tokenizer& tokenize, const DocumentPlan& plan) {
  if (plan.per_kind < 1 || plan.per_kind > static_cast<int>(kMost))
    fail("{} questions of a kind make no sense: 1 to 20", plan.per_kind);
  if (plan.candidates < 2 || plan.candidates > plan.per_kind) {
    fail("{} candidates make no sense: 2 to the {} questions of a kind", plan.candidates, plan.per_kind);
  }
  if (plan.first < 0 || plan.last <= plan.first || plan.last > plan.tokens) {
    fail("a document of {} tokens leaves no room for facts from {} to {}: use a larger -c", plan.tokens, plan.first, plan.last);
  }
  Dice dice(plan.seed);
  const auto n = static_cast<std::size_t>(plan.per_kind), n_candidates = static_cast<std::size_t>(plan.candidates);
  const std::vector<std::size_t> word_order = dice.shuffled(kWords.size()), town_order = dice.shuffled(kMost),
                                 person_order = dice.shuffled(kMost), home = dice.shuffled(n);
  std::vector<std::string> secrets, values, keys;  // secrets[i] belongs to the i-th town; person i lives in town home[i]
  for (std::size_t i = 0; i < n; ++i) secrets.emplace_back(kWords[word_order[i]]);
  for (std::size_t i = 0; i < kPairs; ++i) values.emplace_back(kWords[word_order[kMost + i]]);
  while (keys.size() < kPairs) {
    const std::string key = random_key(dice);
    if (std::find(keys.begin(), keys.end(), key) == keys.end()) keys.push_back(key);
  }
  const auto town = [&](std::size_t i) { return std::string(kTowns[town_order[i]]); };
  const auto person = [&](std::size_t i) { return std::string(kPersons[person_order[i]]); };

  std::vector<Fact> facts;
  std::string list = "\n\nThe register:\n";
  for (std::size_t i = 0; i < kPairs; ++i) list += fmt::format("{}: {}\n", keys[i], values[i]);
  facts.push_back({plan.first, fmt::format("{}\n", list)});
  const int room = (plan.last - plan.first) * 9 / 10;  // facts wait for the end of a sentence, and for each other
  for (std::size_t i = 0; i < n; ++i) {
    const int depth = static_cast<int>(i % kNeedleDepths);
    facts.push_back({plan.first + room * (2 * depth + 1) / (2 * kNeedleDepths),
                     fmt::format(" The secret word of the town of {} is {}.", town(i), secrets[i])});
    facts.push_back({plan.first + static_cast<int>(dice.below(static_cast<std::size_t>(room))),
                     fmt::format(" {} lives in the town of {}.", person(i), town(home[i]))});
  }

  Document document;
  document.tokens = laid_out(std::move(facts), filler, tokenize, plan);
  const auto ask = [&](const char* kind, int depth, const std::string& text, const std::vector<std::string>& words,
                       std::size_t right) {
    Question& question = document.questions.emplace_back();
    question.kind = kind;
    question.depth = depth;
    question.ask = tokenize(text);
    add_candidates(question, words, right, n_candidates, tokenize, dice);
  };
  for (std::size_t i = 0; i < n; ++i) {
    const std::string fact = fmt::format("secret word of the town of {} is", town(i));
    ask("needle", static_cast<int>(i % kNeedleDepths), fmt::format("\n\nAs we have read, the {}", fact), secrets, i);
  }
  for (std::size_t i = 0; i < n; ++i) {
    ask("two-facts", -1,
        fmt::format(
            "\n\nAs we have read, {0} lives in a town with a secret word. The secret word of the town where {0} lives is",
            person(i)),
        secrets, home[i]);
  }
  const std::vector<std::size_t> asked = dice.shuffled(kPairs);
  for (std::size_t i = 0; i < n; ++i) {
    ask("lookup", -1, fmt::format("\n\nAs we have read, the register says:\n{}:", keys[asked[i]]), values, asked[i]);
  }
  return document;
}

}  // namespace oscar::cli
