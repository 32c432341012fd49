#include "eval_tasks.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "oscar/base/error.h"

namespace oscar::cli {
namespace {

std::span<const float> row_of(const Model& model, const Context& context, int row) {
  return {context.logits(row), static_cast<std::size_t>(model.n_vocab())};
}

double log_probability(std::span<const float> logits, double log_sum, llama_token token) {
  return static_cast<double>(logits[static_cast<std::size_t>(token)]) - log_sum;
}

Choice choose(const Model& model, Context& context, int position, const Question& question) {
  const int asked = static_cast<int>(question.ask.size());
  context.decode(question.ask, position, position + asked - 1);
  std::vector<double> scores;
  // All first tokens before any second one: the next decode replaces the logits.
  const std::span<const float> logits = row_of(model, context, 0);
  const double log_sum = log_sum_exp(logits);
  for (const Tokens& candidate : question.candidates) scores.push_back(log_probability(logits, log_sum, candidate.at(0)));
  for (std::size_t c = 0; c < question.candidates.size(); ++c) {
    const Tokens& candidate = question.candidates[c];
    if (candidate.size() < 2) continue;
    if (asked + static_cast<int>(candidate.size()) > kQuestionTokens)
      fail("a question of {} tokens is too long: at most {} with its answer", asked, kQuestionTokens);
    context.decode({candidate.begin(), candidate.end() - 1}, position + asked, position + asked);
    for (std::size_t i = 1; i < candidate.size(); ++i) {
      const std::span<const float> next = row_of(model, context, static_cast<int>(i) - 1);
      scores[c] += log_probability(next, log_sum_exp(next), candidate[i]);
    }
    context.rewind(position + asked);
  }
  Choice out;
  out.chosen = static_cast<int>(std::max_element(scores.begin(), scores.end()) - scores.begin());
  double sum = 0;
  for (const double score : scores) sum += std::exp(score - scores[static_cast<std::size_t>(question.right)]);
  out.probability = 1 / sum;
  context.rewind(position);
  return out;
}

}  // namespace

std::vector<Choice> answer_questions(const Model& model, Context& context, const Document& document, int n_ubatch,
                                     const std::function<void(std::size_t)>& decoded) {
  context.clear();
  const int n = static_cast<int>(document.tokens.size());
  for (int begin = 0; begin < n; begin += n_ubatch) {
    if (interrupted()) fail("interrupted");
    const int end = std::min(n, begin + n_ubatch);
    context.decode({document.tokens.begin() + begin, document.tokens.begin() + end}, begin, std::numeric_limits<int>::max());
    decoded(static_cast<std::size_t>(end - begin));
  }
  std::vector<Choice> out;
  for (const Question& question : document.questions) {
    if (interrupted()) fail("interrupted");
    out.push_back(choose(model, context, n, question));
    decoded(question.ask.size());
  }
  return out;
}

Tokens continue_greedily(const Model& model, Context& context, int end, int row, int length, const Tokens& expected) {
  Tokens out;
  for (int i = 0; i < length; ++i) {
    const std::span<const float> logits = row_of(model, context, i == 0 ? row : 0);
    out.push_back(static_cast<llama_token>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
    if (i + 1 == length || (!expected.empty() && out.back() != expected[static_cast<std::size_t>(i)])) break;
    context.decode({out.back()}, end + i, end + i);
  }
  context.rewind(end);
  return out;
}

}  // namespace oscar::cli
