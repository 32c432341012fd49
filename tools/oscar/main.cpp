#include <cstdio>

#include "cli.h"

int main(int argc, char** argv) {
  using namespace oscar::cli;
  CommandLine line;
  add_calibrate(line);
  add_run(line);
  add_exec(line);
  add_compare(line);
  add_eval(line);
  add_bench(line);
  add_report(line);
  add_card(line);
  add_inspect(line);
  add_convert(line);
  add_merge(line);

  bool markdown = false;
  Command& help = line.add("help", "print the list of commands");
  help.flag("--markdown", markdown, "the whole reference as Markdown (docs/cli.md)");
  help.hide();
  help.action([&] {
    std::fputs(markdown ? line.markdown().c_str() : line.help_text().c_str(), stdout);
    return kOk;
  });
  return line.main(argc, argv);
}
