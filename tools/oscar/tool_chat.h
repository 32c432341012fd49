// A long chat in which the assistant answers with function calls in JSON, and further requests behind it: does a cache still
// know the functions it was told at the beginning, and the values it was told since?
//
// The system turn defines eight functions. Persons book tables and get a code, say where they live, ask for the weather and so
// on; every answer is {"name": ..., "arguments": {...}} without spaces. The 20 requests behind the chat: 7 give a table back
// (its code was told once), 7 send a parcel to a person (whose town was told once), and one for each of the other functions
// (whose arguments are in the request). Names of functions are chosen among all eight, codes and towns among those that were
// told, so that even a tiny model scores well above chance.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "retrieval.h"

namespace oscar::cli {

struct ChatTurn {
  std::string role, content;  // system, user, assistant
};
// The turns as the model's template writes them, with the start of an assistant's turn when wanted.
using Renderer = std::function<std::string(const std::vector<ChatTurn>&, bool add_assistant)>;

inline constexpr int kCallsAsked = 20;    // requests behind a chat
inline constexpr int kAnswerTokens = 64;  // the longest answer that is generated
inline constexpr int kChatTokens = 160;   // room behind the chat for a request and its answer
inline constexpr int kLeastChat = 2560;   // context that holds a chat in most vocabularies

struct CallRequest {
  Tokens ask;                   // the user's turn and the start of the assistant's
  Question function, argument;  // behind `ask` and the part of the call that precedes the name, or the value
  std::string call;             // the right answer
};

struct ToolChat {
  Tokens tokens;
  std::vector<CallRequest> requests;
};

struct ChatPlan {
  int tokens = 0;           // the longest the chat may be; it ends with a whole turn
  int first = 0, last = 0;  // values that are asked for later are told at positions first .. last
  std::uint64_t seed = 1;
};

// The same arguments give the same chat everywhere. Error when the chat does not fit, or when the template changes earlier
// turns.
ToolChat make_tool_chat(const Renderer& render, const Tokenizer& tokenize, const ChatPlan& plan);

struct CallJudgement {
  bool json = false;   // a JSON object and nothing else
  bool call = false;   // ... that calls one of the functions with its arguments, all of them strings
  bool right = false;  // ... and is the right one
};
CallJudgement judge_call(const std::string& answer, const std::string& right);
// Whether `text` is a whole JSON object, so that generating can stop.
bool is_object(const std::string& text);

}  // namespace oscar::cli
