// One HTML page that needs nothing else: tables as HTML, plots drawn by an inlined Chart.js from JSON in the page.
#pragma once

#include <string>
#include <vector>

#include "report_data.h"

namespace oscar::cli {

struct ReportInputs {
  std::string title, date;
  std::vector<ResultFile> results;
  std::vector<ArtifactFile> artifacts;
};

// Error when this program was built without Chart.js. A Content-Security-Policy in the page forbids every request.
std::string report_page(const ReportInputs& inputs);

}  // namespace oscar::cli
