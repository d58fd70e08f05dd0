//! Ratios against peers, measured in one run.
