// Partial schedules, and lower bounds of the makespans of their completions.
#include "reshard.h"

#include <algorithm>

namespace fxpar::reshard {

Timeline::Timeline(const Problem& problem)
    : problem_(problem), free_(problem.num_interfaces), loads_(problem.cuts.size()) {
  for (const Class& flows : problem.classes)
    for (const auto [cut, times] : problem.share_of[flows.kind]) loads_[cut] += times * flows.time * flows.count;
  for (size_t cut = 0; cut < loads_.size(); ++cut)
    initial_bound_ = std::max(initial_bound_, divide_up(loads_[cut], problem.cuts[cut].size()));
}

Time Timeline::earliest(const Kind& kind) const {
  Time time = 0;
  for (int interface : kind.fixed) time = std::max(time, free_[interface]);
  return time;
}

Schedule Timeline::schedule() const {
  Schedule schedule{makespan(), {}};
  for (const Step& step : steps_) schedule.placements.push_back(step.placement);
  return schedule;
}

void Timeline::place(const Placement& placement) {
  const Class& flow = problem_.classes[placement.class_index];
  const Kind& kind = problem_.kinds[flow.kind];
  const Time end = placement.start + flow.time;
  for_each_interface(kind, placement.sender, [&](int interface) {
    saved_.push_back(free_[interface]);
    set_free_from(interface, end);
  });
  for (const auto [cut, times] : problem_.share_of[flow.kind]) loads_[cut] -= times * flow.time;
  Step step{placement, std::max(makespan(), end), bound()};
  for_each_interface(kind, placement.sender, [&](int interface) {
    for (int cut : problem_.cuts_of[interface]) {
      const std::size_t size = problem_.cuts[cut].size();
      if (loads_[cut] > step.bound * static_cast<Time>(size)) step.bound = divide_up(loads_[cut], size);
    }
  });
  steps_.push_back(step);
}

void Timeline::append(int class_index, int sender) {
  place({class_index, sender, std::max(earliest(problem_.kind_of(class_index)), free_[sender])});
}

void Timeline::undo() {
  const Placement placement = steps_.back().placement;
  steps_.pop_back();
  const Class& flow = problem_.classes[placement.class_index];
  const Kind& kind = problem_.kinds[flow.kind];
  const size_t first = saved_.size() - kind.fixed.size() - 1;
  size_t next = first;
  for_each_interface(kind, placement.sender, [&](int interface) { set_free_from(interface, saved_[next++]); });
  saved_.resize(first);
  for (const auto [cut, times] : problem_.share_of[flow.kind]) loads_[cut] += times * flow.time;
}

void Timeline::set_free_from(int interface, Time time) {
  for (int cut : problem_.cuts_of[interface]) loads_[cut] += time - free_[interface];
  free_[interface] = time;
}

}  // namespace fxpar::reshard
