//! Whole-program tests against independent tools and real guests.
