// Chats with function calls, and what counts as a valid answer.
#include "tool_chat.h"

#include <gtest/gtest.h>

#include <cctype>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "oscar/base/error.h"
#include "vocabulary.h"

namespace oscar::cli {
namespace {

// Runs of letters are tokens, everything else is one token a character; `pieces` of three letters make words of several tokens.
class Letters : public Vocabulary {
 public:
  explicit Letters(std::size_t longest) : longest_(longest) {}
  Tokens operator()(const std::string& text) {
    Tokens out;
    for (std::size_t begin = 0; begin < text.size();) {
      std::size_t end = begin + 1;
      const auto letter = [&](std::size_t i) { return std::isalpha(static_cast<unsigned char>(text[i])) != 0; };
      while (letter(begin) && end < text.size() && letter(end) && end - begin < longest_) ++end;
      const std::string word = text.substr(begin, end - begin);
      out.push_back(id(word));
      begin = end;
    }
    return out;
  }

 private:
  std::size_t longest_;
};

std::string render(const std::vector<ChatTurn>& turns, bool assistant) {
  std::string text;
  for (const ChatTurn& turn : turns) text += "<" + turn.role + ">" + turn.content + "\n";
  return assistant ? text + "<assistant>" : text;
}

ChatPlan plan_of(int tokens, std::uint64_t seed = 1) {
  ChatPlan plan;
  plan.tokens = tokens;
  plan.first = 64;
  plan.last = tokens - 400;
  plan.seed = seed;
  return plan;
}

TEST(ToolChat, HoldsWhatIsAskedFor) {
  for (const std::size_t longest : {std::size_t{99}, std::size_t{3}}) {
    Letters letters(longest);
    const int size = longest == 3 ? 9000 : 6000;
    const ToolChat chat = make_tool_chat(
        render, [&](const std::string& t) { return letters(t); }, plan_of(size));
    EXPECT_LE(chat.tokens.size(), static_cast<std::size_t>(size));
    EXPECT_GT(chat.tokens.size(), static_cast<std::size_t>(size) - 200);
    const std::string text = letters.text(chat.tokens);
    const std::string early = letters.text({chat.tokens.begin() + 64, chat.tokens.end() - 400});
    ASSERT_TRUE(text.starts_with("<system>"));
    // Every answer in the chat is a valid call.
    int answers = 0;
    for (std::size_t at = text.find("<assistant>"); at != std::string::npos; at = text.find("<assistant>", at + 1)) {
      const std::string call = text.substr(at + 11, text.find('\n', at) - at - 11);
      EXPECT_TRUE(judge_call(call, call).right) << call;
      ++answers;
    }
    EXPECT_GE(answers, 30);
    ASSERT_EQ(chat.requests.size(), static_cast<std::size_t>(kCallsAsked));
    std::map<std::string, int> functions;
    std::set<int> slots;
    for (const CallRequest& r : chat.requests) {
      const auto call = nlohmann::ordered_json::parse(r.call);
      ++functions[call["name"]];
      slots.insert(r.function.right);
      const std::string ask = letters.text(r.ask);
      ASSERT_TRUE(ask.starts_with("<user>") && ask.ends_with("<assistant>")) << ask;
      const auto person = [&](const std::string& before, const std::string& after) {
        const std::size_t at = ask.find(before) + before.size();
        return ask.substr(at, ask.find(after, at) - at);
      };
      if (call["name"] == "cancel_table") {  // the code is in the turn after the booking
        const std::size_t booked = early.find("Book a table for " + person("the table of ", " back") + " in ");
        ASSERT_NE(booked, std::string::npos) << ask;
        const std::size_t told = early.find("The code of the table is ", booked);
        const std::string code = call["arguments"]["code"];
        EXPECT_EQ(early.substr(told + 25, code.size() + 1), code + ".");
        EXPECT_LT(told - booked, 200U);
        EXPECT_EQ(ask.find(code), std::string::npos);
      } else if (call["name"] == "send_parcel") {
        const std::string city = call["arguments"]["city"];
        EXPECT_NE(early.find("Note that " + person(" to ", ".") + " lives in " + city + "."), std::string::npos) << ask;
        EXPECT_EQ(ask.find(city), std::string::npos);
      }
      for (const auto& [question, right, candidates] :
           {std::tuple(&r.function, call["name"].get<std::string>(), 8U),
            std::tuple(&r.argument, call["arguments"].begin().value().get<std::string>(), 6U)}) {
        ASSERT_EQ(question->candidates.size(), candidates);
        std::set<std::string> distinct;
        for (const Tokens& c : question->candidates) {
          EXPECT_FALSE(c.empty());
          distinct.insert(letters.text(c));
        }
        EXPECT_EQ(distinct.size(), candidates);
        // The question ends where the word begins, or behind letters that all candidates share.
        const std::string asked = letters.text(question->ask);
        const std::string begun = letters.text(question->candidates[static_cast<std::size_t>(question->right)]);
        const std::size_t quote = asked.rfind('"');
        EXPECT_TRUE((right + "\"").starts_with(asked.substr(quote + 1) + begun)) << asked << "|" << begun << "|" << right;
        EXPECT_TRUE(asked.starts_with(ask));
      }
    }
    EXPECT_EQ(functions, (std::map<std::string, int>{{"add_contact", 1},
                                                     {"book_table", 1},
                                                     {"cancel_table", 7},
                                                     {"find_route", 1},
                                                     {"get_weather", 1},
                                                     {"play_music", 1},
                                                     {"send_parcel", 7},
                                                     {"set_alarm", 1}}));
    EXPECT_GE(slots.size(), 4U);  // answers in the same slot could be guessed
  }
}

TEST(ToolChat, SeedsDecide) {
  Letters letters(99);
  const auto tokenize = [&](const std::string& t) { return letters(t); };
  const ToolChat a = make_tool_chat(render, tokenize, plan_of(6000)), b = make_tool_chat(render, tokenize, plan_of(6000));
  EXPECT_EQ(a.tokens, b.tokens);
  EXPECT_EQ(a.requests[3].call, b.requests[3].call);
  EXPECT_NE(a.tokens, make_tool_chat(render, tokenize, plan_of(6000, 2)).tokens);
}

TEST(ToolChat, ImpossiblePlansAreRefused) {
  Letters letters(99);
  const auto tokenize = [&](const std::string& t) { return letters(t); };
  EXPECT_THROW(make_tool_chat(render, tokenize, plan_of(2000)), Error);
  EXPECT_THROW(make_tool_chat(render, tokenize, plan_of(300)), Error);
  const auto counting = [](const std::vector<ChatTurn>& turns, bool assistant) {
    return std::to_string(turns.size()) + render(turns, assistant);
  };
  EXPECT_THROW(make_tool_chat(counting, tokenize, plan_of(6000)), Error);
}

TEST(ToolChat, Judgement) {
  const std::string right = R"({"name":"get_weather","arguments":{"city":"Corwick","day":"Friday"}})";
  const auto judged = [&](const std::string& answer) {
    const CallJudgement j = judge_call(answer, right);
    return fmt::format("{:d}{:d}{:d}", j.json, j.call, j.right);
  };
  EXPECT_EQ(judged(right), "111");
  EXPECT_EQ(judged(R"(  { "arguments": {"day": "Friday", "city": "Corwick"}, "name": "get_weather" } )"), "111");
  EXPECT_EQ(judged(R"({"name":"get_weather","arguments":{"city":"Corwick","day":"Monday"}})"), "110");
  EXPECT_EQ(judged(R"({"name":"cancel_table","arguments":{"code":"apple"}})"), "110");
  EXPECT_EQ(judged(R"({"name":"get_weather","arguments":{"city":"Corwick"}})"), "100");
  EXPECT_EQ(judged(R"({"name":"get_weather","arguments":{"city":"Corwick","day":5}})"), "100");
  EXPECT_EQ(judged(R"({"name":"get_wether","arguments":{"city":"Corwick","day":"Friday"}})"), "100");
  EXPECT_EQ(judged(R"({"name":["get_weather"],"arguments":"x"})"), "100");
  EXPECT_EQ(judged("[1]"), "000");
  EXPECT_EQ(judged(right + "."), "000");
  EXPECT_EQ(judged("Sure: " + right), "000");
  EXPECT_EQ(judged(right.substr(0, right.size() - 1)), "000");
  EXPECT_EQ(judged("\xff{}"), "000");
  EXPECT_EQ(judged(""), "000");
  EXPECT_TRUE(is_object(" {\"a\":{}}"));
  EXPECT_FALSE(is_object("{\"a\":{}"));
  EXPECT_FALSE(is_object("{}{}"));
}

}  // namespace
}  // namespace oscar::cli
