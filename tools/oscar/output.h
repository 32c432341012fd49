// Results on stdout (Markdown, JSON, CSV or HTML from one description), progress on stderr.
#pragma once

#include <chrono>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace oscar::cli {

enum class Format { md, json, csv };
Format parse_format(const std::string& text);  // Error listing the formats

// One table; cells are JSON values so that csv and md print what json carries.
class Table {
 public:
  explicit Table(std::vector<std::string> columns) : columns_(std::move(columns)) {}
  void add(std::vector<nlohmann::ordered_json> row);
  [[nodiscard]] std::string markdown() const;  // aligned
  [[nodiscard]] std::string csv() const;
  [[nodiscard]] std::string html() const;             // <table>, cells escaped
  [[nodiscard]] nlohmann::ordered_json json() const;  // array of objects keyed by the columns
  [[nodiscard]] bool empty() const { return rows_.empty(); }

 private:
  std::vector<std::string> columns_;
  std::vector<std::vector<nlohmann::ordered_json>> rows_;
};

std::string html_escaped(std::string_view text);  // for elements and quoted attributes
std::string human_bytes(double bytes);            // "1.23 GiB"
std::string human_seconds(double seconds);        // "1m 05s"
void print(const std::string& text);              // stdout, flushed
// Error when a file of this name cannot be written: a word before the work, not after it.
void check_writable(const std::string& path);

// A bar with time left: rewritten in place on a terminal, else one line now and then, so that logs stay short.
class Progress {
 public:
  Progress(std::string label, double total, std::string unit);
  ~Progress() { finish(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void update(double done);  // since the start, in units
  void finish();             // ends the line

 private:
  using Clock = std::chrono::steady_clock;
  std::string label_, unit_;
  double total_;
  Clock::time_point start_ = Clock::now(), shown_ = start_;
  bool terminal_;
  bool open_ = false;
};

}  // namespace oscar::cli
