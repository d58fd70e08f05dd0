//! Fuzz targets: one per parser and per wire.
