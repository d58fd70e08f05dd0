//! Ways of serving a disk set side by side, with honest statistics and a report.
