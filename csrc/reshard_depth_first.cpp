// Branch and bound over the order of flows and over their senders.
#include "reshard.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

namespace fxpar::reshard {
namespace {

constexpr int kMostFlows = 4096;  // the search recurses once per flow

class DepthFirst {
 public:
  DepthFirst(const Problem& problem, Schedule incumbent, Time bound, int64_t budget)
      : problem_(problem), best_(std::move(incumbent)), bound_(bound), budget_(budget), timeline_(problem),
        is_marked_(problem.num_interfaces) {
    for (const Class& flows : problem.classes) left_.push_back(flows.count);
    find_twins();
  }

  Schedule run() {
    expand();
    return std::move(best_);
  }

 private:
  struct Branch {
    Placement placement;
    Time bound;  // on the makespan of all completions
    Time load;   // the greatest load of an interface that the flow occupies

    auto rank() const {
      return std::make_tuple(bound, placement.start, -load, placement.class_index, placement.sender);
    }
  };

  // A host's twin is the last host before it that may send the same flows, if neither receives any.
  void find_twins() {
    std::vector<std::vector<int>> kinds_of(problem_.num_interfaces);
    std::vector<bool> is_fixed(problem_.num_interfaces);
    for (size_t k = 0; k < problem_.kinds.size(); ++k) {
      for (int sender : problem_.kinds[k].senders) kinds_of[sender].push_back(k);
      for (int interface : problem_.kinds[k].fixed) is_fixed[interface] = true;
    }
    twin_.assign(problem_.num_interfaces, -1);
    for (int host = 0; host < problem_.num_interfaces; ++host)
      for (int other = 0; other < host; ++other)
        if (kinds_of[host] == kinds_of[other] && !is_fixed[host] && !is_fixed[other]) twin_[host] = other;
  }

  // Whether a twin becomes free at the same time, so that sending from `sender` would be an equal branch.
  bool repeats_twin(int sender) const {
    for (int twin = twin_[sender]; twin >= 0; twin = twin_[twin])
      if (timeline_.free_from(twin) == timeline_.free_from(sender)) return true;
    return false;
  }

  // Calls visit(placement) for every way to append a flow.
  template <typename Visit>
  void for_each_way(Visit visit) {
    int kind_index = -1;
    Time fixed_free_from = 0;
    for (size_t c = 0; c < problem_.classes.size(); ++c) {
      if (left_[c] == 0) continue;
      const Kind& kind = problem_.kind_of(c);
      if (std::exchange(kind_index, problem_.classes[c].kind) != problem_.classes[c].kind)
        fixed_free_from = timeline_.earliest(kind);
      for (int sender : kind.senders) {
        if (repeats_twin(sender)) continue;
        --budget_;
        visit(Placement{static_cast<int>(c), sender, std::max(fixed_free_from, timeline_.free_from(sender))});
      }
    }
  }

  // Let F be the flow that could end first. On some interface of F, the next flow starts before that end: otherwise F
  // could be moved there. So it suffices to branch over the flows that use an interface of F and start before its end
  // (the active schedules of Giffler and Thompson, "Algorithms for Solving Production-Scheduling Problems").
  void find_branches() {
    Placement first{};
    Time first_end = std::numeric_limits<Time>::max();
    for_each_way([&](const Placement& placement) {
      const Time end = placement.start + problem_.classes[placement.class_index].time;
      if (end < first_end) std::tie(first, first_end) = std::tie(placement, end);
    });
    mark(first, true);
    for_each_way([&](const Placement& placement) {
      if (placement.start < first_end && is_on_marked(placement)) branches_.push_back(weigh(placement));
    });
    mark(first, false);
  }

  void mark(const Placement& placement, bool value) {
    for_each_interface(problem_.kind_of(placement.class_index), placement.sender,
                       [&](int interface) { is_marked_[interface] = value; });
  }

  bool is_on_marked(const Placement& placement) const {
    bool found = false;
    for_each_interface(problem_.kind_of(placement.class_index), placement.sender,
                       [&](int interface) { found = found || is_marked_[interface]; });
    return found;
  }

  Branch weigh(const Placement& placement) {
    Branch branch{placement, 0, 0};
    for_each_interface(problem_.kind_of(placement.class_index), placement.sender, [&](int interface) {
      branch.load = std::max(branch.load, timeline_.load_of(interface));
      budget_ -= problem_.cuts_of[interface].size();
    });
    timeline_.place(placement);
    branch.bound = timeline_.bound();
    timeline_.undo();
    return branch;
  }

  bool is_done() const { return budget_ <= 0 || best_.makespan <= bound_; }

  // Tries every completion of the timeline that may be better than the best schedule, the most promising first.
  void expand() {
    if (timeline_.size() == problem_.num_flows) {
      best_ = timeline_.schedule();
      return;
    }
    const size_t begin = branches_.size();
    find_branches();
    std::sort(branches_.begin() + begin, branches_.end(),
              [](const Branch& one, const Branch& other) { return one.rank() < other.rank(); });
    const size_t end = branches_.size();
    for (size_t i = begin; i < end && branches_[i].bound < best_.makespan && !is_done(); ++i) {
      const Placement placement = branches_[i].placement;
      --left_[placement.class_index];
      timeline_.place(placement);
      expand();
      timeline_.undo();
      ++left_[placement.class_index];
    }
    branches_.resize(begin);
  }

  const Problem& problem_;
  Schedule best_;
  const Time bound_;
  int64_t budget_;  // counts the ways to append a flow, and the cuts that a flow loads
  Timeline timeline_;
  std::vector<int> left_;         // by class: how many of its flows are not placed
  std::vector<int> twin_;         // by interface; -1 if there is none
  std::vector<Branch> branches_;  // of all levels of the recursion
  std::vector<bool> is_marked_;   // by interface
};

}  // namespace

Schedule search_depth_first(const Problem& problem, Schedule incumbent, Time bound, int64_t budget) {
  int64_t ways = 0;
  for (size_t c = 0; c < problem.classes.size(); ++c) ways += problem.kind_of(c).senders.size();
  const bool is_too_large = problem.num_flows > kMostFlows || ways * problem.num_flows > budget;
  if (incumbent.makespan <= bound || is_too_large) return incumbent;
  return DepthFirst(problem, std::move(incumbent), bound, budget).run();
}

}  // namespace fxpar::reshard
