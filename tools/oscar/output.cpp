#include "output.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>

#include "oscar/base/error.h"

namespace oscar::cli {
namespace {

std::string cell(const nlohmann::ordered_json& value) {
  if (value.is_null()) return "-";
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  if (value.is_number_float()) return fmt::format("{:.4g}", value.get<double>());
  return value.dump();
}

std::string csv_cell(const nlohmann::ordered_json& value) {
  if (value.is_null()) return "";
  std::string text = value.is_string() ? value.get<std::string>() : value.dump();
  if (text.find_first_of(",\"\n") == std::string::npos) return text;
  for (std::size_t at = 0; (at = text.find('"', at)) != std::string::npos; at += 2) text.insert(at, 1, '"');
  return fmt::format("\"{}\"", text);
}

// Columns of a terminal, not bytes: a dash or a plus-minus sign is one.
std::size_t width(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

}  // namespace

Format parse_format(const std::string& text) {
  if (text == "md") return Format::md;
  if (text == "json") return Format::json;
  if (text == "csv") return Format::csv;
  fail("there is no output format {}: md, json or csv", text);
}

void Table::add(std::vector<nlohmann::ordered_json> row) { rows_.push_back(std::move(row)); }

std::string Table::markdown() const {
  std::vector<std::size_t> widths;
  widths.reserve(columns_.size());
  for (const std::string& column : columns_) widths.push_back(width(column));
  std::vector<std::vector<std::string>> cells;
  std::vector<bool> numeric(columns_.size(), true);
  for (const auto& row : rows_) {
    cells.emplace_back();
    for (std::size_t i = 0; i < columns_.size(); ++i) {
      cells.back().push_back(cell(row[i]));
      widths[i] = std::max(widths[i], width(cells.back().back()));
      if (!row[i].is_number() && !row[i].is_null()) numeric[i] = false;
    }
  }
  const auto line = [&](const std::vector<std::string>& parts) {
    std::string out = "|";
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const std::string pad(widths[i] - width(parts[i]), ' ');
      out += numeric[i] ? fmt::format(" {}{} |", pad, parts[i]) : fmt::format(" {}{} |", parts[i], pad);
    }
    out += '\n';
    return out;
  };
  std::string out = line(columns_);
  out += '|';
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    out.append(widths[i] + 1, '-');
    out += numeric[i] ? ":|" : "-|";
  }
  out += '\n';
  for (const auto& row : cells) out += line(row);
  return out;
}

std::string Table::csv() const {
  std::string out;
  const auto add_row = [&out](const auto& cells) {
    for (std::size_t i = 0; i < cells.size(); ++i) out += fmt::format("{}{}", i == 0 ? "" : ",", csv_cell(cells[i]));
    out += '\n';
  };
  add_row(columns_);
  for (const auto& row : rows_) add_row(row);
  return out;
}

std::string Table::html() const {
  const auto numeric = [&](std::size_t column) {
    return std::all_of(rows_.begin(), rows_.end(),
                       [&](const auto& row) { return row[column].is_number() || row[column].is_null(); });
  };
  std::vector<std::string> tags;
  std::string out = "<table><thead><tr>";
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    tags.emplace_back(numeric(i) ? "<td class=\"n\">" : "<td>");
    out += fmt::format("<th{}>{}</th>", numeric(i) ? " class=\"n\"" : "", html_escaped(columns_[i]));
  }
  out += "</tr></thead><tbody>";
  for (const auto& row : rows_) {
    out += "<tr>";
    for (std::size_t i = 0; i < columns_.size(); ++i) out += fmt::format("{}{}</td>", tags[i], html_escaped(cell(row[i])));
    out += "</tr>";
  }
  return out + "</tbody></table>";
}

nlohmann::ordered_json Table::json() const {
  nlohmann::ordered_json out = nlohmann::ordered_json::array();
  for (const auto& row : rows_) {
    nlohmann::ordered_json object;
    for (std::size_t i = 0; i < columns_.size(); ++i) object[columns_[i]] = row[i];
    out.push_back(std::move(object));
  }
  return out;
}

std::string html_escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string human_bytes(double bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  for (; bytes >= 1024.0 && unit < 4; ++unit) bytes /= 1024.0;
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.2f} {}", bytes, units[unit]);
}

std::string human_seconds(double seconds) {
  if (!std::isfinite(seconds)) return "?";
  const auto whole = static_cast<long>(std::lround(std::max(0.0, seconds)));
  if (whole < 60) return fmt::format("{}s", whole);
  if (whole < 3600) return fmt::format("{}m {:02}s", whole / 60, whole % 60);
  return fmt::format("{}h {:02}m", whole / 3600, whole / 60 % 60);
}

void check_writable(const std::string& path) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::path(path).has_parent_path() ? fs::path(path).parent_path() : fs::path(".");
  if (fs::is_directory(path)) fail("{} is a directory; name a file", path);
  if (!fs::is_directory(folder)) fail("{} cannot be written: there is no folder {}", path, folder.string());
  if (access(folder.c_str(), W_OK) != 0) fail("{} cannot be written: the folder {} is read-only", path, folder.string());
}

void print(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

Progress::Progress(std::string label, double total, std::string unit)
    : label_(std::move(label)), unit_(std::move(unit)), total_(total), terminal_(isatty(STDERR_FILENO) != 0) {}

void Progress::update(double done) {
  const Clock::time_point now = Clock::now();
  const std::chrono::duration<double> quiet = now - shown_;
  if (done < total_ && quiet.count() < (terminal_ ? 0.2 : 10.0)) return;
  shown_ = now;
  const double seconds = std::max(1e-9, std::chrono::duration<double>(now - start_).count());
  const double share = total_ > 0 ? std::min(1.0, done / total_) : 1.0;
  const double rate = done / seconds;
  std::string line =
      fmt::format("{} {:3.0f}% {:.0f}/{:.0f} {} {:.1f} {}/s", label_, 100.0 * share, done, total_, unit_, rate, unit_);
  line += done < total_ ? fmt::format(", {} left", human_seconds((total_ - done) / std::max(rate, 1e-9)))
                        : fmt::format(", {}", human_seconds(seconds));
  if (terminal_) {
    fmt::print(stderr, "\r\x1b[K{}", line);
    open_ = true;
  } else {
    fmt::print(stderr, "{}\n", line);
  }
  std::fflush(stderr);
}

void Progress::finish() {
  if (open_) fmt::print(stderr, "\n");
  open_ = false;
}

}  // namespace oscar::cli
