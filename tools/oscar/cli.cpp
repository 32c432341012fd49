#include "cli.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <sstream>

#include "oscar/base/error.h"
#include "oscar/version.h"

namespace oscar::cli {
namespace {

constexpr std::size_t kWidth = 100;
constexpr std::size_t kIndent = 30;

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

// CLI11 knows "-x" and "--long" only; anything like "-ub" is ours to translate.
bool is_wide_short(const std::string& name) { return name.size() > 2 && name[0] == '-' && name[1] != '-'; }

std::string wrap(const std::string& text, std::size_t indent, std::size_t column) {
  std::string out;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    if (column > indent && column + 1 + word.size() > kWidth) {
      out += '\n';
      out.append(indent, ' ');
      column = indent;
    } else if (column > indent) {
      out += ' ';
      ++column;
    }
    out += word;
    column += word.size();
  }
  return out;
}

std::string entry(const std::string& left, const std::string& right) {
  std::string out = fmt::format("  {}", left);
  std::size_t column = out.size();
  if (column + 1 > kIndent) {
    out += "\n";
    column = 0;
  }
  out.append(kIndent - column, ' ');
  return fmt::format("{}{}\n", out, wrap(right, kIndent, kIndent));
}

std::string described(const OptionDoc& doc) {
  std::string text = doc.help;
  if (!doc.default_text.empty()) text += fmt::format(" (default: {})", doc.default_text);
  if (!doc.env.empty()) text += fmt::format(" [env {}]", doc.env);
  return text;
}

std::string title(const OptionDoc& doc) {
  std::string out = fmt::format("{}", fmt::join(doc.names, ", "));
  if (!doc.value.empty() && doc.names.front()[0] == '-') out += fmt::format(" {}", doc.value);
  return out;
}

std::string escaped(std::string text) {  // for a cell of a Markdown table
  for (std::size_t at = 0; (at = text.find('|', at)) != std::string::npos; at += 2) text.insert(at, 1, '\\');
  return text;
}

// Edit distance, for "did you mean".
std::size_t distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

struct UsageError {
  std::string message;
};

// Rewrites "-ub 128" to "--ubatch-size 128" and names unknown flags. Values are skipped, so a prompt may start with a dash.
std::vector<std::string> translate(const Command& command, const std::vector<std::string>& args) {
  std::vector<std::string> out;
  for (std::size_t i = 0; i < args.size(); ++i) {
    const std::string& arg = args[i];
    const bool number =
        arg.size() > 1 && arg[0] == '-' && (std::isdigit(static_cast<unsigned char>(arg[1])) != 0 || arg[1] == '.');
    if (arg.size() < 2 || arg[0] != '-' || number) {
      out.push_back(arg);
      continue;
    }
    const std::size_t equals = arg.find('=');
    const std::string name = arg.substr(0, equals);
    const OptionDoc* doc = command.find(name);
    if (doc == nullptr) throw UsageError{name};
    std::string parsed = name;
    if (is_wide_short(name)) {
      for (const std::string& other : doc->names) {
        if (other.rfind("--", 0) == 0) parsed = other;
      }
    }
    out.push_back(equals == std::string::npos ? parsed : parsed + arg.substr(equals));
    if (equals == std::string::npos && doc->option != nullptr && doc->option->get_items_expected_min() > 0 &&
        i + 1 < args.size()) {
      out.push_back(args[++i]);
    }
  }
  return out;
}

}  // namespace

Command::Command(CLI::App& parent, std::string name, std::string summary)
    : name_(std::move(name)), summary_(std::move(summary)), app_(parent.add_subcommand(name_, summary_)) {
  app_->set_help_flag();
  options_.push_back({{"-h", "--help"}, "", "print this help", "", "", app_->add_flag("-h,--help")});
}

CLI::Option* Command::document(const std::string& names, const std::string& meta, const std::string& help,
                               const std::string& shown, const std::string& env,
                               const std::function<CLI::Option*(const std::string&)>& add) {
  OptionDoc doc{split(names, ','), meta, help, shown, env, nullptr};
  std::vector<std::string> parsed;
  for (const std::string& name : doc.names) {
    if (!is_wide_short(name)) parsed.push_back(name);
  }
  doc.option = add(fmt::format("{}", fmt::join(parsed, ",")));
  if (!env.empty()) doc.option->envname(env);
  options_.push_back(doc);
  return doc.option;
}

CLI::Option* Command::flag(const std::string& names, bool& value, const std::string& help, const std::string& env) {
  return document(names, "", help, "", env, [&](const std::string& parsed) { return app_->add_flag(parsed, value); });
}

const OptionDoc* Command::find(const std::string& name) const {
  for (const OptionDoc& doc : options_) {
    if (std::find(doc.names.begin(), doc.names.end(), name) != doc.names.end()) return &doc;
  }
  return nullptr;
}

std::string Command::help_text() const {
  std::string out = fmt::format("oscar {}: {}\n\n", name_, summary_);
  for (const std::string& line : usage_) out += fmt::format("usage: oscar {} {}\n", name_, line);
  for (const std::string& paragraph : paragraphs_) out += fmt::format("\n{}\n", wrap(paragraph, 0, 0));
  out += "\noptions:\n";
  for (const OptionDoc& doc : options_) out += entry(title(doc), described(doc));
  if (!examples_.empty()) out += "\nexamples:\n";
  for (const auto& [line, says] : examples_) out += fmt::format("  {}\n      {}\n", line, wrap(says, 6, 6));
  if (!json_keys_.empty()) out += "\nJSON keys:\n";
  for (const auto& [key, says] : json_keys_) out += entry(key, says);
  return out;
}

std::string Command::markdown() const {
  std::string out = fmt::format("## oscar {}\n\n{}.\n\n```\n", name_, summary_);
  for (const std::string& line : usage_) out += fmt::format("oscar {} {}\n", name_, line);
  out += "```\n";
  for (const std::string& paragraph : paragraphs_) out += fmt::format("\n{}\n", paragraph);
  out += "\n| option | meaning |\n|---|---|\n";
  for (const OptionDoc& doc : options_) out += fmt::format("| `{}` | {} |\n", escaped(title(doc)), escaped(described(doc)));
  if (!examples_.empty()) out += "\nExamples:\n\n";
  for (const auto& [line, says] : examples_) out += fmt::format("* `{}`: {}\n", line, says);
  if (!json_keys_.empty()) out += "\n| JSON key | meaning |\n|---|---|\n";
  for (const auto& [key, says] : json_keys_) out += fmt::format("| `{}` | {} |\n", escaped(key), escaped(says));
  return out;
}

CommandLine::CommandLine() : app_("2-bit KV-cache quantization for llama.cpp", "oscar") {
  app_.set_help_flag();
  app_.require_subcommand(0, 1);
}

Command& CommandLine::add(const std::string& name, const std::string& summary) {
  commands_.push_back(std::make_unique<Command>(app_, name, summary));
  return *commands_.back();
}

std::string CommandLine::help_text() const {
  std::string out = fmt::format(
      "oscar {}: 2-bit KV-cache quantization for llama.cpp\n\nusage: oscar COMMAND [options]\n\ncommands:\n", version());
  for (const auto& command : commands_) {
    if (!command->hidden()) out += entry(command->name(), command->summary());
  }
  out +=
      "\n  oscar COMMAND --help teaches one command; oscar --version prints the version.\n"
      "  Flags win over their environment twins, and those over what an artifact says.\n"
      "  Results go to stdout, progress to stderr. Exit codes: 0 done, 1 bad input, 2 wrong usage,\n"
      "  3 attention was not served by OSCAR.\n"
      "\nfirst steps:\n"
      "  oscar calibrate -m model.gguf -f text.txt\n"
      "  oscar run -m model.gguf -p \"Hello\"\n"
      "  oscar exec -- llama-server -m model.gguf\n";
  return out;
}

std::string CommandLine::markdown() const {
  std::string out =
      "# The `oscar` command\n\n"
      "Written by `oscar help --markdown`; a test checks that this file is current.\n\n"
      "Flags win over their environment twins, and those over what an artifact says. Results go to stdout, progress to "
      "stderr.\n"
      "Exit codes: 0 done, 1 bad input (`inspect`: unsound), 2 wrong usage, 3 attention was not served by OSCAR.\n\n"
      "| command | what it does |\n|---|---|\n";
  for (const auto& command : commands_) {
    if (!command->hidden()) out += fmt::format("| [`{0}`](#oscar-{0}) | {1} |\n", command->name(), command->summary());
  }
  for (const auto& command : commands_) {
    if (!command->hidden()) out += fmt::format("\n{}", command->markdown());
  }
  return out;
}

int CommandLine::main(int argc, char** argv) {
  std::vector<std::string> args(argv + 1, argv + argc);
  if (const auto dashes = std::find(args.begin(), args.end(), "--"); dashes != args.end()) {
    rest_.assign(dashes + 1, args.end());
    args.erase(dashes, args.end());
  }
  if (args.empty() || args[0] == "-h" || args[0] == "--help") {
    std::fputs(help_text().c_str(), args.empty() ? stderr : stdout);
    return args.empty() ? kUsage : kOk;
  }
  if (args[0] == "--version") {
    fmt::print("oscar {}\n", version());
    return kOk;
  }
  const auto found = std::find_if(commands_.begin(), commands_.end(), [&](const auto& c) { return c->name() == args[0]; });
  if (found == commands_.end()) {
    std::string hint;
    for (const auto& command : commands_) {
      if (!command->hidden() && distance(args[0], command->name()) <= 2)
        hint = fmt::format("; did you mean {}?", command->name());
    }
    fmt::print(stderr, "oscar: error: there is no command {}{} (oscar --help lists them)\n", args[0], hint);
    return kUsage;
  }
  const Command& command = **found;
  if (std::find(args.begin(), args.end(), "-h") != args.end() || std::find(args.begin(), args.end(), "--help") != args.end()) {
    std::fputs(command.help_text().c_str(), stdout);
    return kOk;
  }
  try {
    std::vector<std::string> translated = translate(command, {args.begin() + 1, args.end()});
    translated.insert(translated.begin(), args[0]);
    std::reverse(translated.begin(), translated.end());  // CLI11 takes vectors back to front
    app_.parse(translated);
  } catch (const UsageError& error) {
    fmt::print(stderr, "oscar: error: {0} has no option {1} (oscar {0} --help lists them)\n", command.name(), error.message);
    return kUsage;
  } catch (const CLI::ParseError& error) {
    fmt::print(stderr, "oscar: error: {1} (see oscar {0} --help)\n", command.name(), error.what());
    return kUsage;
  }
  try {
    return command.run();
  } catch (const Error& error) {
    fmt::print(stderr, "oscar: error: {}\n", error.what());
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "oscar: error: not enough memory\n");
  } catch (const std::exception& error) {
    fmt::print(stderr, "oscar: error: {}\n", error.what());
  }
  return kBadInput;
}

}  // namespace oscar::cli
