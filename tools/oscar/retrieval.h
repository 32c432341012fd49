// Long documents that hide facts, and questions about them: does a cache still find what lies far back? Answers are a choice
// among candidates that all occur in the document as answers to other questions, so that even a tiny model scores well above
// chance and only the place of a fact, not its plausibility, decides.
//
// Three kinds of question in every document:
//   needle    "The secret word of the town of T is W.", at 10 depths; asked for W
//   two-facts "N lives in the town of T.", elsewhere; asked for the secret word of the town where N lives
//   lookup    a list of pseudo-random keys and their words near the beginning; asked for the word of one key
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace oscar::cli {

using Tokens = std::vector<std::int32_t>;
using Tokenizer = std::function<Tokens(const std::string&)>;

inline constexpr int kNeedleDepths = 10;
inline constexpr int kQuestionTokens = 96;  // room behind the document for one question and its answer

struct Question {
  std::string kind;
  int depth = -1;  // needle: 0 (shallowest) .. kNeedleDepths - 1
  Tokens ask;
  std::vector<Tokens> candidates;  // continuations of `ask`
  int right = 0;
};

struct Document {
  Tokens tokens;
  std::vector<Question> questions;
};

struct DocumentPlan {
  int tokens = 0;           // length of the document
  int first = 0, last = 0;  // facts lie at positions first .. last: where every question reads coded rows
  int per_kind = 10;        // questions of each kind, 1 to 20
  int candidates = 6;       // per question, 2 or more
  std::uint64_t seed = 1;
};

// Sentences of `filler` with the facts between them. The same arguments give the same document everywhere. Error when the facts
// do not fit between first and last.
Document make_document(const std::string& filler, const Tokenizer& tokenize, const DocumentPlan& plan);

}  // namespace oscar::cli
