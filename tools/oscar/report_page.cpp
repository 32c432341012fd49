#include "report_page.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>

#include "oscar/base/error.h"
#include "oscar/version.h"
#include "output.h"

namespace oscar::cli {

// Written by cmake/embed.cmake.
extern const std::string_view embedded_page_css, embedded_page_js;
#if OSCAR_WITH_CHART_JS
extern const std::string_view embedded_chart_js;
#endif

namespace {

using Json = nlohmann::ordered_json;

Json rounded(double value) { return std::isfinite(value) ? Json(std::stod(fmt::format("{:.5g}", value))) : Json(); }
Json percent(double share) { return 100.0 * share; }
Json optional_number(const std::optional<double>& value, double scale = 1) { return value ? Json(scale * *value) : Json(); }

bool of_everything(const MeasuredRow& row) { return row.depth == "all"; }

// --- the head of the page: what was measured, on what, with what ---

std::string fact(const std::string& name, const std::string& value, bool digest = false) {
  if (value.empty()) return "";
  return fmt::format("<tr><th>{}</th><td{}>{}</td></tr>", html_escaped(name), digest ? " class=\"digest\"" : "",
                     html_escaped(value));
}

std::string result_provenance(const ResultFile& r) {
  std::string texts;
  for (const auto& [name, sha256] : r.texts) texts += fmt::format("{}{} ({})", texts.empty() ? "" : ", ", name, sha256);
  const std::string sample =
      fmt::format("{} tokens in sequences of {}, judged from position {} on", r.sequences * r.context, r.context, r.from);
  return fmt::format("<h3>{}: oscar {}</h3><div class=\"card\"><table>{}</table></div>", html_escaped(r.file), r.command,
                     fact("model", r.model) + fact("model fingerprint", r.fingerprint, true) +
                         fact("artifact", r.artifact_digest, true) + fact("texts (SHA-256)", texts, true) +
                         fact("sample", sample) + fact("intervals", r.confidence) +
                         fact("made with", fmt::format("oscar {}{}", r.oscar, r.ggml.empty() ? "" : ", ggml " + r.ggml)) +
                         fact("SHA-256 of the file", r.sha256, true));
}

std::string artifact_provenance(const ArtifactFile& file) {
  const Artifact& a = file.artifact;
  std::string texts;
  for (const TextSource& source : calibration_sources(a))
    texts += fmt::format("{}{} ({}), {} tokens", texts.empty() ? "" : "; ", source.name, source.sha256, source.tokens);
  return fmt::format("<h3>{}: artifact</h3><div class=\"card\"><table>{}</table></div>", html_escaped(file.file),
                     fact("model", fmt::format("{} ({})", a.model.name, a.model.architecture)) +
                         fact("model fingerprint", a.model.fingerprint, true) + fact("digest", a.digest, true) +
                         fact("recipe", fmt::format("{}, {}", a.recipe.codec, describe_rates(a.recipe))) +
                         fact("calibrated on (SHA-256)", texts, true) +
                         fact("made", fmt::format("{} by oscar {}", a.date, a.tool_version)) +
                         fact("verdict", file.fit ? file.fit->verdict : ""));
}

// --- sections ---

// Table beside a plot. The plot's canvas is called KIND-INDEX.
std::string pair(const std::string& kind, std::size_t index, const std::string& description, const std::string& table,
                 int height = 460, const std::string& control = "") {
  return fmt::format(
      "<div class=\"pair\"><div>{0}<div class=\"plot\" style=\"height:{1}px\"><canvas id=\"{2}-{3}\" data-plot=\"{2}\" "
      "data-index=\"{3}\" role=\"img\" aria-label=\"{4}\"></canvas></div></div><div class=\"scroll\">{5}</div></div>",
      control, height, kind, index, html_escaped(description), table);
}

std::string chooser(const std::string& kind, std::size_t index, const std::string& label,
                    const std::vector<std::pair<std::string, std::string>>& choices, const std::string& chosen) {
  std::string out = fmt::format("<label>{} <select data-for=\"{}-{}\">", html_escaped(label), kind, index);
  for (const auto& [value, text] : choices)
    out += fmt::format("<option value=\"{}\"{}>{}</option>", value, value == chosen ? " selected" : "", html_escaped(text));
  return out + "</select></label>";
}

std::string rate_section(const std::vector<ResultFile>& results) {
  Table table(
      {"method", "bits", "KL mean", "±", "KL median", "KL 99 %", "KL max", "same top %", "PPL ratio", "positions", "file"});
  for (const ResultFile& r : results) {
    std::vector<MeasuredRow> rows;
    std::copy_if(r.rows.begin(), r.rows.end(), std::back_inserter(rows), of_everything);
    std::stable_sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.kl_mean < b.kl_mean; });
    for (const MeasuredRow& row : rows) {
      table.add({row.method, optional_number(row.bits), row.kl_mean, (row.kl_high - row.kl_low) / 2, row.kl_p50, row.kl_p99,
                 row.kl_max, percent(row.same_top), row.ppl_ratio, row.positions, r.file});
    }
  }
  return "<h2>Rate and distortion</h2><p>How far the next-token distribution moves from that of the exact 16-bit cache, "
         "against "
         "what an element of the cache really takes. Lower and further left is better. Bars are 95 % intervals; ± in the table "
         "is half of one. Nothing below the noise floor can be told from rounding. A method with KL 0 or unknown bits is in "
         "the "
         "table only.</p>" +
         pair("rate", 0, "KL divergence against bits per element", table.html(), 560);
}

std::string depth_section(const std::vector<ResultFile>& results) {
  std::string out;
  for (std::size_t i = 0; i < results.size(); ++i) {
    const ResultFile& r = results[i];
    if (r.ranges.empty()) continue;
    Table table({"method", "positions", "KL mean", "±", "KL 99 %", "same top %", "judged"});
    for (const MeasuredRow& row : r.rows) {
      if (of_everything(row)) continue;
      table.add({row.method, row.depth, row.kl_mean, (row.kl_high - row.kl_low) / 2, row.kl_p99, percent(row.same_top),
                 row.positions});
    }
    out += fmt::format("<h3>{}</h3>", html_escaped(label_of(r))) +
           pair("depth", i, "KL divergence by context depth", table.html());
  }
  if (out.empty()) return "";
  return "<h2>KL by context depth</h2><p>An error that grows with the length of the context hides in the mean over all "
         "positions.</p>" +
         out;
}

std::string retrieval_section(const std::vector<ResultFile>& results) {
  Table table({"method", "facts found", "questions", "right %", "chance %", "choice as exact %", "file"});
  for (const ResultFile& r : results) {
    for (const RetrievalRow& row : r.retrieval) {
      table.add(
          {row.method, row.kind, row.questions, percent(row.accuracy), percent(row.chance), percent(row.same_choice), r.file});
    }
  }
  if (table.empty()) return "";
  return "<h2>Retrieval</h2><p>Facts hidden in long documents, answered by choice among words of the document.</p><div "
         "class=\"card scroll\">" +
         table.html() + "</div>";
}

// Number of leading coordinates that hold `share` of the sum of squared steps (or of eigenvalues).
int coordinates_of(const std::vector<double>& variance, double share) {
  const double total = std::accumulate(variance.begin(), variance.end(), 0.0);
  double sum = 0;
  for (std::size_t i = 0; i < variance.size(); ++i) {
    sum += variance[i];
    if (sum >= share * total) return static_cast<int>(i) + 1;
  }
  return static_cast<int>(variance.size());
}

// One KV head, as the plots see it. Spectral: step sizes at 2 bits, which follow the deviation of each whitened coordinate;
// else eigenvalues of the rotation, descending.
struct HeadView {
  int layer = 0, head = 0;
  std::vector<double> spectrum, variance;
  std::vector<std::string> widths;  // per rate, one character per coordinate: its base-4 digits
};

std::vector<HeadView> heads_of(const Artifact& artifact) {
  std::vector<HeadView> out;
  for (const LayerArtifact& layer : artifact.layers) {
    const SpectralLayer& s = layer.spectral;
    const auto rows = static_cast<int>(s.empty() ? layer.k_eigenvalues.rows() : layer.shape.n_head_kv);
    for (int h = 0; h < rows; ++h) {
      HeadView view;
      view.layer = layer.shape.layer;
      view.head = h;
      if (s.empty()) {
        for (Eigen::Index d = layer.k_eigenvalues.cols(); d-- > 0;) view.spectrum.push_back(layer.k_eigenvalues(h, d));
        view.variance = view.spectrum;
      } else {
        for (Eigen::Index d = 0; d < s.step[0].cols(); ++d) view.spectrum.push_back(s.step[0](h, d));
        for (const double step : view.spectrum) view.variance.push_back(step * step);
        for (const MatrixF& width : s.width) {
          std::string& digits = view.widths.emplace_back();
          for (Eigen::Index d = 0; d < width.cols(); ++d) digits += static_cast<char>('0' + static_cast<int>(width(h, d)) / 2);
        }
      }
      out.push_back(std::move(view));
    }
  }
  return out;
}

std::string expectation_table(const FitSummary& fit) {
  Table table({"layer", "K noise %", "int2 %", "K error %", "V error %", "K mean share %", "worrying heads"});
  for (const LayerExpectation& l : fit.layers) {
    std::string worried;
    for (const WorriedHead& w : fit.worried) {
      if (w.layer == l.layer) worried += fmt::format("{}{}: {}", worried.empty() ? "" : "; ", w.head, w.why);
    }
    table.add({l.layer, optional_number(l.key_noise, 100), optional_number(l.key_noise_int2, 100), percent(l.k_error),
               percent(l.v_error), percent(l.mean_share), worried});
  }
  return table.html();
}

std::string artifact_section(const ArtifactFile& file, std::size_t index) {
  const Artifact& artifact = file.artifact;
  const std::vector<HeadView> heads = heads_of(artifact);
  std::string out = fmt::format("<h2>{} ({})</h2>", html_escaped(artifact.model.name), html_escaped(file.file));
  out += "<h3>Expected error per layer</h3>";
  if (!file.fit) {
    out += "<p>This artifact does not say what its calibration expected: it was converted, or made by an older oscar.</p>";
  } else {
    out +=
        "<p>Noise that coded keys are expected to add to the output of attention, relative to that output; K error and V error "
        "are relative squared errors of logits and of values.</p>" +
        pair("error", index, "Expected noise of coded keys by layer", expectation_table(*file.fit));
  }
  if (heads.empty()) return out;
  const bool spectral = !heads.front().widths.empty();
  Table table({"layer", "head", "largest", "smallest", "half of the variance in", "90 % in"});
  std::vector<std::pair<std::string, std::string>> layers{{"all", "all (first blue, last red)"}};
  for (const HeadView& h : heads) {
    const auto [low, high] = std::minmax_element(h.spectrum.begin(), h.spectrum.end());
    table.add({h.layer, h.head, *high, *low, coordinates_of(h.variance, 0.5), coordinates_of(h.variance, 0.9)});
    if (layers.back().first != std::to_string(h.layer)) layers.emplace_back(std::to_string(h.layer), std::to_string(h.layer));
  }
  out += fmt::format("<h3>Spectra of the keys</h3><p>{}</p>",
                     spectral ? "Step of each coordinate at 2 bits, about its standard deviation, in whitened units: 1 is the "
                                "largest deviation of the layer, and equal units cost attention equally. The steeper, the more "
                                "there is to gain from unequal widths."
                              : "Eigenvalues of the rotation's moment, descending.") +
         pair("spectrum", index, "Spectrum of the keys of each head", table.html(), 460,
              chooser("spectrum", index, "layer", layers, "all"));
  if (!spectral) return out;

  std::vector<std::pair<std::string, std::string>> rates;
  std::string chosen = "1";
  for (std::size_t r = 0; r < kSpectralRates.size(); ++r) {
    rates.emplace_back(std::to_string(r), fmt::format("{} bits", kSpectralRates[r]));
    if (kSpectralRates[r] == artifact.recipe.k_bits) chosen = std::to_string(r);
  }
  Table bits({"layer", "head", "1.5 bits", "2 bits", "2.5 bits", "3 bits"});
  for (const HeadView& h : heads) {
    std::vector<Json> row{h.layer, h.head};
    for (const std::string& digits : h.widths) {
      const int sum = std::accumulate(digits.begin(), digits.end(), 0, [](int n, char c) { return n + (c - '0'); });
      row.emplace_back(2.0 * sum / static_cast<double>(digits.size()));
    }
    bits.add(std::move(row));
  }
  out +=
      "<h3>Width map of the keys</h3><p>Bits of every coordinate of every KV head. The layer's bits are shared out over its "
      "heads, so that the sum of errors is least; the table has each head's mean at each rate.</p>" +
      pair("widths", index, "Bits of each coordinate of each head", bits.html(),
           std::clamp(100 + 11 * static_cast<int>(heads.size()), 200, 1500), chooser("widths", index, "rate", rates, chosen));
  return out;
}

// --- the data of the plots ---

Json plot_data(const ResultFile& r) {
  Json points = Json::array(), series = Json::array();
  std::vector<std::string> methods;
  for (const MeasuredRow& row : r.rows) {
    if (!of_everything(row)) {
      if (std::find(methods.begin(), methods.end(), row.method) == methods.end()) methods.push_back(row.method);
      continue;
    }
    points.push_back({{"label", row.label},
                      {"group", to_string(row.group)},
                      {"bits", optional_number(row.bits)},
                      {"kl", rounded(row.kl_mean)},
                      {"low", rounded(row.kl_low)},
                      {"high", rounded(row.kl_high)}});
  }
  for (const std::string& method : methods) {
    Json kl = Json::array();
    const MeasuredRow* any = nullptr;
    for (const std::string& range : r.ranges) {
      const auto found = std::find_if(r.rows.begin(), r.rows.end(),
                                      [&](const MeasuredRow& row) { return row.method == method && row.depth == range; });
      kl.push_back(found == r.rows.end() ? Json() : rounded(found->kl_mean));
      if (found != r.rows.end()) any = &*found;
    }
    series.push_back({{"label", any->label}, {"group", to_string(any->group)}, {"kl", kl}});
  }
  return {{"label", label_of(r)}, {"points", points}, {"depth", {{"ranges", r.ranges}, {"series", series}}}};
}

Json plot_data(const ArtifactFile& file) {
  Json layers = Json::array(), heads = Json::array();
  if (file.fit) {
    for (const LayerExpectation& l : file.fit->layers) {
      layers.push_back(
          {{"layer", l.layer}, {"noise", optional_number(l.key_noise)}, {"int2", optional_number(l.key_noise_int2)}});
    }
  }
  bool spectral = false;
  for (const HeadView& h : heads_of(file.artifact)) {
    Json spectrum = Json::array();
    for (const double value : h.spectrum) spectrum.push_back(rounded(value));
    heads.push_back({{"layer", h.layer}, {"head", h.head}, {"spectrum", spectrum}, {"widths", h.widths}});
    spectral = spectral || !h.widths.empty();
  }
  return {{"codec", file.artifact.recipe.codec},
          {"spectrum", spectral ? "step at 2 bits, whitened units" : "eigenvalue"},
          {"layers", layers},
          {"heads", heads}};
}

// JSON inside a script element: "<" must not end it.
std::string script_json(const Json& json) {
  std::string out;
  for (const char c : json.dump()) {
    if (c == '<') {
      out += "\\u003c";
    } else {
      out += c;
    }
  }
  return out;
}

std::string chart_js() {
#if OSCAR_WITH_CHART_JS
  return std::string(embedded_chart_js);
#else
  fail(
      "report needs Chart.js, and this oscar was built without it: install Debian's libjs-chart.js (or set "
      "-DOSCAR_CHART_JS=<chart.min.js>) and build again");
#endif
}

}  // namespace

std::string report_page(const ReportInputs& inputs) {
  const std::string charts = chart_js();
  Json data{{"sources", Json::array()}, {"artifacts", Json::array()}};
  std::string provenance, sections;
  for (const ResultFile& r : inputs.results) {
    data["sources"].push_back(plot_data(r));
    provenance += result_provenance(r);
  }
  for (const ArtifactFile& a : inputs.artifacts) {
    data["artifacts"].push_back(plot_data(a));
    provenance += artifact_provenance(a);
  }
  if (!inputs.results.empty())
    sections += rate_section(inputs.results) + depth_section(inputs.results) + retrieval_section(inputs.results);
  for (std::size_t i = 0; i < inputs.artifacts.size(); ++i) sections += artifact_section(inputs.artifacts[i], i);
  const std::string title = html_escaped(inputs.title);
  return fmt::format(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n<meta http-equiv=\"Content-Security-Policy\" "
      "content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n<meta name=\"viewport\" "
      "content=\"width=device-width, initial-scale=1\">\n<title>{0}</title>\n<style>\n{1}</style></head>\n<body><header>"
      "<h1>{0}</h1><p class=\"soft\">Written by oscar {2} on {3}.</p>{4}</header>\n<main>{5}</main>\n"
      "<footer><p>KL in nats per token, from the exact 16-bit cache to the method's. This page loads nothing; its plots are "
      "drawn "
      "by Chart.js (MIT licence), which is inside.</p></footer>\n"
      "<script type=\"application/json\" id=\"data\">{6}</script>\n<script>{7}</script>\n<script>{8}</script></body></html>\n",
      title, embedded_page_css, version(), html_escaped(inputs.date), provenance, sections, script_json(data), charts,
      embedded_page_js);
}

}  // namespace oscar::cli
