// `oscar report`: results and artifacts as one HTML page with plots.
#include "cli.h"
#include "oscar/base/date.h"
#include "oscar/base/error.h"
#include "oscar/io/files.h"
#include "output.h"
#include "report_page.h"

namespace oscar::cli {
namespace {

struct ReportOptions {
  std::vector<std::string> results, artifacts;
  std::string output = "oscar-report.html", title = "OSCAR: quality of the KV cache";
};

int report(const ReportOptions& options) {
  if (options.results.empty() && options.artifacts.empty())
    fail("there is nothing to report: name results of oscar eval or compare (-o json), or an artifact with --oscar");
  ReportInputs inputs{options.title, utc_date(), {}, {}};
  for (const std::string& path : options.results) inputs.results.push_back(read_result(path));
  for (const std::string& path : options.artifacts) inputs.artifacts.push_back(read_report_artifact(path));
  const std::string page = report_page(inputs);
  if (options.output == "-") {
    print(page);
    return kOk;
  }
  AtomicFile file(options.output);
  file.write(page);
  file.commit();
  print(fmt::format("{}: {} results, {} artifacts, {}\n", options.output, inputs.results.size(), inputs.artifacts.size(),
                    human_bytes(static_cast<double>(page.size()))));
  return kOk;
}

}  // namespace

void add_report(CommandLine& line) {
  Command& command = line.add("report", "results and calibrations as one HTML page with plots");
  const auto options = std::make_shared<ReportOptions>();
  command.usage("[RESULT.json ...] [--oscar ARTIFACT ...] [-o FILE]");
  command.text(
      "Sets any number of results of oscar eval -o json and oscar compare -o json side by side: KL divergence against real "
      "bits "
      "per element, KL by context depth, retrieval. For each artifact: the error its calibration expects per layer, the "
      "spectra "
      "of the keys per layer and head, and the bits of every coordinate. Every plot stands beside its table, and the page "
      "begins "
      "with what was measured on what: digests, texts, samples, versions.");
  command.text("The page is one file that loads nothing: it can be kept, mailed and opened without a network.");
  command.option("RESULT", options->results, "RESULT ...", "result of oscar eval or oscar compare, JSON");
  command.option("--oscar", options->artifacts, "FILE", "calibration artifact to show; repeatable")->allow_extra_args(false);
  command.option("-o,--output", options->output, "FILE", "page to write, - = stdout");
  command.option("--title", options->title, "TEXT", "heading of the page");
  command.example("oscar report build/eval-smollm2.json --oscar smollm2.oscar.safetensors", "what was measured, and why");
  command.example("oscar report prose.json code.json -o both.html", "two texts in one plot");
  command.action([options] { return report(*options); });
}

}  // namespace oscar::cli
