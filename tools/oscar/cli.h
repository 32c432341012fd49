// The command line of `oscar`: CLI11 does the parsing; this layer adds what llama.cpp's users expect and CLI11 lacks (short
// names of several letters such as -ub, one environment twin per flag) and keeps every flag's documentation in one table from
// which --help and docs/cli.md are both written.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

namespace oscar::cli {

// Exit codes of every command.
inline constexpr int kOk = 0;
inline constexpr int kBadInput = 1;   // a file, model or value cannot be used; inspect: unsound
inline constexpr int kUsage = 2;      // the command line itself is wrong
inline constexpr int kNotServed = 3;  // it ran, but attention was not (or not wholly) served by OSCAR

struct OptionDoc {
  std::vector<std::string> names;  // as the user types them: "-ub", "--ubatch-size"
  std::string value;               // "N", "FILE"; empty for switches
  std::string help;
  std::string default_text;  // empty: none
  std::string env;           // empty: none
  CLI::Option* option = nullptr;
};

// One sub-command: `names` such as "-m,--model"; positionals have one name without dashes.
class Command {
 public:
  Command(CLI::App& parent, std::string name, std::string summary);

  template <class T>
  CLI::Option* option(const std::string& names, T& value, const std::string& meta, const std::string& help,
                      const std::string& env = "") {
    std::string shown;
    if constexpr (std::is_arithmetic_v<T>) shown = fmt::format("{}", value);
    if constexpr (std::is_same_v<T, std::string>) shown = value;
    return document(names, meta, help, shown, env, [&](const std::string& parsed) { return app_->add_option(parsed, value); });
  }
  CLI::Option* flag(const std::string& names, bool& value, const std::string& help, const std::string& env = "");

  void usage(std::string line) { usage_.push_back(std::move(line)); }
  void text(std::string paragraph) { paragraphs_.push_back(std::move(paragraph)); }
  void example(std::string line, std::string says) { examples_.emplace_back(std::move(line), std::move(says)); }
  void json_key(std::string key, std::string says) { json_keys_.emplace_back(std::move(key), std::move(says)); }
  void action(std::function<int()> run) { action_ = std::move(run); }
  void hide() { hidden_ = true; }

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const std::string& summary() const { return summary_; }
  [[nodiscard]] bool hidden() const { return hidden_; }
  [[nodiscard]] CLI::App& app() const { return *app_; }
  [[nodiscard]] int run() const { return action_(); }
  [[nodiscard]] const OptionDoc* find(const std::string& name) const;
  [[nodiscard]] std::string help_text() const;
  [[nodiscard]] std::string markdown() const;

 private:
  CLI::Option* document(const std::string& names, const std::string& meta, const std::string& help, const std::string& shown,
                        const std::string& env, const std::function<CLI::Option*(const std::string&)>& add);

  std::string name_, summary_;
  CLI::App* app_;
  std::vector<OptionDoc> options_;
  std::vector<std::string> usage_, paragraphs_;
  std::vector<std::pair<std::string, std::string>> examples_, json_keys_;
  std::function<int()> action_;
  bool hidden_ = false;
};

// The whole program.
class CommandLine {
 public:
  CommandLine();
  Command& add(const std::string& name, const std::string& summary);
  int main(int argc, char** argv);  // parses, runs, reports; returns the exit code
  [[nodiscard]] std::string help_text() const;
  [[nodiscard]] std::string markdown() const;
  // What follows the first "--" on the command line (the program of `exec`).
  [[nodiscard]] const std::vector<std::string>& rest() const { return rest_; }

 private:
  CLI::App app_;
  std::vector<std::unique_ptr<Command>> commands_;
  std::vector<std::string> rest_;
};

void add_inspect(CommandLine& line);
void add_convert(CommandLine& line);
void add_merge(CommandLine& line);
void add_calibrate(CommandLine& line);
void add_run(CommandLine& line);
void add_exec(CommandLine& line);
void add_compare(CommandLine& line);
void add_eval(CommandLine& line);
void add_bench(CommandLine& line);
void add_report(CommandLine& line);
void add_card(CommandLine& line);

}  // namespace oscar::cli
