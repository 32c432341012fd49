// `oscar merge`: moments of several runs become the moments of one.
#include <set>

#include "cli.h"
#include "oscar/base/error.h"
#include "oscar/io/sha256.h"
#include "oscar/method/moments.h"
#include "output.h"

namespace oscar::cli {
namespace {

struct MergeOptions {
  std::vector<std::string> inputs;
  std::string output;
};

int run_merge(const MergeOptions& options) {
  if (options.inputs.size() < 2) fail("merge adds the moments of two or more files; {} was named", options.inputs.size());
  if (options.output.empty()) fail("where should the sum go? use -o FILE");
  check_writable(options.output);
  std::set<std::string> digests;
  for (const std::string& input : options.inputs) {
    if (!digests.insert(sha256_file(input)).second)
      fail("{} is named twice (or a copy of it): its tokens would count double", input);
  }
  ModelMoments sum = load_moments(options.inputs[0]);
  for (std::size_t i = 1; i < options.inputs.size(); ++i) merge(sum, load_moments(options.inputs[i]));
  save_moments(sum, options.output);
  std::int64_t tokens = 0;
  for (const TextSource& source : sum.sources) tokens += source.tokens;
  print(fmt::format("{}: {} files, {} texts, {} tokens\n", options.output, options.inputs.size(), sum.sources.size(), tokens));
  return kOk;
}

}  // namespace

void add_merge(CommandLine& line) {
  Command& command = line.add("merge", "add the moments of several calibration runs");
  const auto options = std::make_shared<MergeOptions>();
  command.usage("A.moments.safetensors B.moments.safetensors ... -o OUT.moments.safetensors");
  command.text(
      "Runs over different texts, or on different machines, add up: every token counts alike, whatever file it came from. "
      "Files of another "
      "model are refused. Fit the sum with oscar calibrate --from-moments OUT.");
  command.option("FILE", options->inputs, "FILE ...", "moments to add, two or more");
  command.option("-o,--output", options->output, "FILE", "sum to write");
  command.example("oscar merge prose.moments.safetensors code.moments.safetensors -o both.moments.safetensors",
                  "one file of both");
  command.action([options] { return run_merge(*options); });
}

}  // namespace oscar::cli
