#include "tool_chat.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "oscar/base/error.h"
#include "word_lists.h"

namespace oscar::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Function {
  const char* name;
  const char* description;
  const char* first;
  const char* second;  // null: one parameter
};
enum Kind : std::size_t { kBook, kCancel, kContact, kParcel, kWeather, kAlarm, kMusic, kRoute };
// Names differ in their first words, so that the first token of a name decides.
constexpr std::array<Function, 8> kFunctions = {{{"book_table", "Books a table and tells its code", "person", "city"},
                                                 {"cancel_table", "Gives a table back", "code", nullptr},
                                                 {"add_contact", "Notes where a person lives", "person", "city"},
                                                 {"send_parcel", "Sends an item to a city", "city", "item"},
                                                 {"get_weather", "Tells the weather", "city", "day"},
                                                 {"set_alarm", "Sets the alarm clock", "day", "hour"},
                                                 {"play_music", "Plays a song", "title", nullptr},
                                                 {"find_route", "Describes the way", "start", "goal"}}};
constexpr std::array<Kind, 4> kFillers = {kWeather, kAlarm, kMusic, kRoute};
constexpr std::array<const char*, 7> kDays = {"Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"};
constexpr std::array<const char*, 6> kHours = {"five", "six", "seven", "eight", "nine", "ten"};
constexpr std::size_t kFacts = 10;    // tables, and as many homes: half of the persons each
constexpr std::size_t kExamples = 3;  // tables given back and parcels sent within the chat; the other 7 are asked for
constexpr std::size_t kCandidates = 6;

struct Call {
  Kind kind = kBook;
  std::string request;
  std::string first, second;  // values of the parameters
  std::string result = "Done.";
  std::vector<std::string> pool;  // what the first value is chosen among

  [[nodiscard]] std::string text_to_name() const { return R"({"name":")"; }
  [[nodiscard]] std::string text_to_value() const {
    const Function& f = kFunctions[kind];
    return fmt::format(R"({{"name":"{}","arguments":{{"{}":")", f.name, f.first);
  }
  [[nodiscard]] std::string text() const {
    const Function& f = kFunctions[kind];
    const std::string more = f.second == nullptr ? "" : fmt::format(R"(,"{}":"{}")", f.second, second);
    return fmt::format(R"({}{}"{}}}}})", text_to_value(), first, more);
  }
};

template <std::size_t N>
std::vector<std::string> strings(const std::array<const char*, N>& words) {
  return {words.begin(), words.end()};
}

class Scenario {
 public:
  explicit Scenario(std::uint64_t seed)
      : dice(seed), persons_(dice.shuffled(kNames)), towns_(dice.shuffled(kNames)), words_(dice.shuffled(kWords.size())) {}

  // Table or home i < kFacts; what is said of it, and what later needs it.
  Call book(std::size_t i) { return book(person(i), fmt::format("Done. The code of the table is {}.", word(i))); }
  Call cancel(std::size_t i) {
    return {kCancel, fmt::format("Give the table of {} back.", person(i)), word(i), "", "Done.", codes()};
  }
  Call contact(std::size_t i) { return contact(person(kFacts + i), town(i)); }
  Call parcel(std::size_t i) {
    const std::string item = any_word();
    return {kParcel, fmt::format("Send the {} to {}.", item, person(kFacts + i)), town(i), item, "Done.", homes()};
  }
  // Of any other kind: all values are in the request.
  Call other(Kind kind) {
    switch (kind) {
      case kBook:
        return book(any(kPersons), "Done.");
      case kContact: {
        const std::string person = any(kPersons);
        return contact(person, any(kTowns));
      }
      case kWeather: {
        const std::string city = any(kTowns), day = any(kDays);
        return {kind, fmt::format("What will the weather be in {} on {}?", city, day), city, day, "Sunny.", strings(kTowns)};
      }
      case kAlarm: {
        const std::string day = any(kDays), hour = any(kHours);
        return {kind, fmt::format("Wake me on {} at {}.", day, hour), day, hour, "Done.", strings(kDays)};
      }
      case kMusic: {
        const std::string title = any_word();
        return {kind, fmt::format("Play the song about the {}.", title), title, "", "Done.", strings(kWords)};
      }
      case kRoute: {
        const std::string start = any(kTowns), goal = any(kTowns);
        return {kind,           fmt::format("How do I get from {} to {}?", start, goal), start, goal, "Follow the road.",
                strings(kTowns)};
      }
      default:
        fail("calls of kind {} need a fact", static_cast<int>(kind));
    }
  }

  Dice dice;

 private:
  static Call book(const std::string& person, const std::string& result, const std::string& city) {
    return {kBook, fmt::format("Book a table for {} in {}.", person, city), person, city, result, strings(kPersons)};
  }
  Call book(const std::string& person, const std::string& result) { return book(person, result, any(kTowns)); }
  static Call contact(const std::string& person, const std::string& city) {
    return {kContact, fmt::format("Note that {} lives in {}.", person, city), person, city, "Done.", strings(kPersons)};
  }
  [[nodiscard]] std::string person(std::size_t i) const { return kPersons[persons_[i]]; }
  [[nodiscard]] std::string town(std::size_t i) const { return kTowns[towns_[i]]; }
  [[nodiscard]] std::string word(std::size_t i) const { return kWords[words_[i]]; }
  std::string any_word() { return word(kFacts + dice.below(kWords.size() - kFacts)); }
  template <std::size_t N>
  std::string any(const std::array<const char*, N>& words) {
    return words[dice.below(N)];
  }
  [[nodiscard]] std::vector<std::string> codes() const {
    std::vector<std::string> all;
    for (std::size_t i = 0; i < kFacts; ++i) all.push_back(word(i));
    return all;
  }
  [[nodiscard]] std::vector<std::string> homes() const {
    std::vector<std::string> all;
    for (std::size_t i = 0; i < kFacts; ++i) all.push_back(town(i));
    return all;
  }

  std::vector<std::size_t> persons_, towns_, words_;
};

// The calls that later requests depend on, in random order, each example behind its fact.
std::vector<Call> facts_and_examples(Scenario& scenario) {
  std::vector<Call> calls;
  std::vector<std::size_t> place(2 * kFacts);
  for (const std::size_t fact : scenario.dice.shuffled(2 * kFacts)) {
    place[fact] = calls.size();
    calls.push_back(fact < kFacts ? scenario.book(fact) : scenario.contact(fact - kFacts));
  }
  for (const std::size_t base : {std::size_t{0}, kFacts}) {
    for (std::size_t i = kFacts - kExamples; i < kFacts; ++i) {
      const std::size_t behind = place[base + i] + 1;
      const std::size_t at = behind + scenario.dice.below(calls.size() - behind + 1);
      calls.insert(calls.begin() + static_cast<std::ptrdiff_t>(at), base == 0 ? scenario.cancel(i) : scenario.parcel(i));
      for (std::size_t& p : place) p += p >= at ? 1U : 0U;
    }
  }
  return calls;
}

std::string system_text() {
  std::string text =
      "You answer every request with one call of a function, in JSON and without any other word. The functions:\n";
  for (const Function& f : kFunctions) {
    Json parameters{{f.first, "string"}};
    if (f.second != nullptr) parameters[f.second] = "string";
    text += Json{{"name", f.name}, {"description", f.description}, {"parameters", parameters}}.dump() + "\n";
  }
  return text;
}

// What `after` adds to `before`.
std::string added(const std::string& before, const std::string& after) {
  if (!after.starts_with(before))
    fail(
        "this model's chat template changes earlier turns when a turn is added, so a chat cannot be continued: leave task "
        "tools out");
  return after.substr(before.size());
}

std::size_t common_prefix(const Tokens& a, const Tokens& b) {
  return static_cast<std::size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

// Choice of a word behind `text`, which a quotation mark ends. Tokens are those of the whole text, so that no border between
// tokens is put where the model would not; a candidate ends with the token that no other one shares.
Question choice(const std::string& text, const std::vector<std::string>& words, int right, const Tokenizer& tokenize) {
  Question question;
  question.right = right;
  std::vector<Tokens> whole;
  whole.reserve(words.size());
  for (const std::string& word : words) whole.push_back(tokenize(fmt::format("{}{}\"", text, word)));
  std::size_t shared = whole[0].size();
  for (const Tokens& other : whole) shared = std::min(shared, common_prefix(whole[0], other));
  question.ask.assign(whole[0].begin(), whole[0].begin() + static_cast<std::ptrdiff_t>(shared));
  for (std::size_t i = 0; i < whole.size(); ++i) {
    std::size_t unique = 0;
    for (std::size_t j = 0; j < whole.size(); ++j) {
      if (j != i) unique = std::max(unique, common_prefix(whole[i], whole[j]) + 1);
    }
    if (unique > whole[i].size()) fail("this model's tokens cannot tell '{}' from other words", words[i]);
    question.candidates.emplace_back(whole[i].begin() + static_cast<std::ptrdiff_t>(shared),
                                     whole[i].begin() + static_cast<std::ptrdiff_t>(unique));
  }
  return question;
}

CallRequest request_of(const Call& call, const std::string& turn, const Tokenizer& tokenize, Dice& dice) {
  CallRequest request;
  request.ask = tokenize(turn);
  request.call = call.text();
  std::vector<std::string> names;
  int right = 0;
  for (const std::size_t f : dice.shuffled(kFunctions.size())) {
    if (f == call.kind) right = static_cast<int>(names.size());
    names.emplace_back(kFunctions[f].name);
  }
  request.function = choice(turn + call.text_to_name(), names, right, tokenize);
  std::vector<std::string> others;
  for (const std::size_t i : dice.shuffled(call.pool.size())) {
    if (call.pool[i] != call.first && others.size() + 1 < kCandidates) others.push_back(call.pool[i]);
  }
  right = static_cast<int>(dice.below(others.size() + 1));
  others.insert(others.begin() + right, call.first);
  request.argument = choice(turn + call.text_to_value(), others, right, tokenize);
  const std::size_t longest = std::max(request.argument.ask.size(), request.ask.size() + kAnswerTokens);
  if (longest + 16 > kChatTokens) fail("a request and its answer take {} tokens, at most {} fit", longest, kChatTokens - 16);
  return request;
}

}  // namespace

ToolChat make_tool_chat(const Renderer& render, const Tokenizer& tokenize, const ChatPlan& plan) {
  if (plan.first < 0 || plan.last <= plan.first || plan.last > plan.tokens)
    fail("a chat of {} tokens leaves no room for facts from {} to {}: use a larger -c", plan.tokens, plan.first, plan.last);
  Scenario scenario(plan.seed);
  const std::vector<Call> needed = facts_and_examples(scenario);
  std::vector<ChatTurn> turns{{"system", system_text()}};
  std::string text = render(turns, false);
  ToolChat chat;
  chat.tokens = tokenize(text);
  const auto size = [&] { return static_cast<int>(chat.tokens.size()); };
  std::string result;  // of the call before
  const auto user_turn = [&](const Call& call) {
    return ChatTurn{"user", result.empty() ? call.request : fmt::format("{} {}", result, call.request)};
  };
  const int first = std::max(plan.first, size());
  std::size_t next = 0, fillers = 0;
  bool late = false;
  for (;;) {
    const bool due = next < needed.size() &&
                     size() >= first + (plan.last - first) * 9 / 10 * static_cast<int>(next) / static_cast<int>(needed.size());
    const Call call = due ? needed[next] : scenario.other(kFillers[fillers % kFillers.size()]);
    std::vector<ChatTurn> more = turns;
    more.push_back(user_turn(call));
    more.push_back({"assistant", call.text()});
    const std::string longer = render(more, false);
    const Tokens tokens = tokenize(added(text, longer));
    if (size() + static_cast<int>(tokens.size()) > plan.tokens) break;
    chat.tokens.insert(chat.tokens.end(), tokens.begin(), tokens.end());
    turns = std::move(more);
    text = longer;
    result = call.result;
    next += due ? 1U : 0U;
    fillers += due ? 0U : 1U;
    late = late || (due && size() > plan.last);
  }
  if (next < needed.size() || late || fillers < kFillers.size())
    fail("a chat of {} tokens has no room for the {} calls it needs: use a larger -c", plan.tokens, needed.size());

  std::vector<Call> asked;
  for (std::size_t i = 0; i + kExamples < kFacts; ++i) {
    asked.push_back(scenario.cancel(i));
    asked.push_back(scenario.parcel(i));
  }
  for (const Kind kind : {kBook, kContact, kWeather, kAlarm, kMusic, kRoute}) asked.push_back(scenario.other(kind));
  for (const Call& call : asked) {
    std::vector<ChatTurn> more = turns;
    more.push_back(user_turn(call));
    chat.requests.push_back(request_of(call, added(text, render(more, true)), tokenize, scenario.dice));
  }
  return chat;
}

bool is_object(const std::string& text) {
  if (text.find('}') == std::string::npos) return false;
  return Json::parse(text, nullptr, false).is_object();
}

CallJudgement judge_call(const std::string& answer, const std::string& right) {
  CallJudgement judgement;
  const Json json = Json::parse(answer, nullptr, false);
  judgement.json = json.is_object();
  if (!judgement.json || json.size() != 2 || !json.contains("name") || !json.contains("arguments")) return judgement;
  const Json& arguments = json["arguments"];
  for (const Function& f : kFunctions) {
    if (json["name"] != f.name || !arguments.is_object()) continue;
    judgement.call = arguments.size() == (f.second == nullptr ? 1U : 2U);
    for (const char* parameter : {f.first, f.second}) {
      judgement.call &= parameter == nullptr || (arguments.contains(parameter) && arguments[parameter].is_string());
    }
  }
  // As values: the order of the arguments and white space do not matter.
  judgement.right = judgement.call && nlohmann::json(json) == nlohmann::json::parse(right);
  return judgement;
}

}  // namespace oscar::cli
