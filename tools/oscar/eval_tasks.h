// What eval asks of a context beside the logits of a text: choices among candidates, and greedy continuations.
#pragma once

#include <functional>
#include <vector>

#include "eval_report.h"
#include "retrieval.h"
#include "session.h"
#include "tool_chat.h"

namespace oscar::cli {

// Reads the document once, then asks one question after another behind it. The context's cache must keep kQuestionTokens of
// 16-bit rows for going back (setting rollback). `decoded`: tokens just decoded.
std::vector<Choice> answer_questions(const Model& model, Context& context, const Document& document, int n_ubatch,
                                     const std::function<void(std::size_t)>& decoded);

struct CallAnswer {
  Choice function, argument;
  Tokens text;  // greedy, up to the end of a JSON object, of the turn, or of kAnswerTokens; empty when not asked for
};
// Reads the chat once, then puts every request behind it. The context's cache must keep kChatTokens for going back.
std::vector<CallAnswer> answer_calls(const Model& model, Context& context, const ToolChat& chat, int n_ubatch, bool generate,
                                     const std::function<void(std::size_t)>& decoded);
// Tokens that one request costs, about.
std::size_t cost_of(const CallRequest& request, bool generate);

// Greedy continuation behind position `end`, whose logits are in the row `row`; stops after `length` tokens, or with the first
// that differs from `expected` when that is not empty. The context is back at `end` afterwards.
Tokens continue_greedily(const Model& model, Context& context, int end, int row, int length, const Tokens& expected);

}  // namespace oscar::cli
