//! A simulated disk: volatile cache, any completion order, torn sectors, errors, power cuts; all from a seed.
