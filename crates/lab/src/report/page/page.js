// Tables of class "sort": a click on a head, or Enter or Space on it, sorts by its column.
for (const table of document.querySelectorAll("table.sort")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.tabIndex = 0;
    head.setAttribute("aria-sort", "none");
    const sort = () => {
      const up = head.getAttribute("aria-sort") === "descending";
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => {
        const cell = row.cells[column];
        const text = cell.dataset.v ?? cell.textContent.trim();
        const number = Number(text);
        return text !== "" && !Number.isNaN(number) ? number : text;
      };
      const order = (a, b) => {
        const [x, y] = [key(a), key(b)];
        // What has no number stands last, whichever way the rest is sorted.
        if (x === "" || y === "") return x === y ? 0 : x === "" ? 1 : -1;
        const both = typeof x === "number" && typeof y === "number";
        const less = both ? x - y : String(x).localeCompare(String(y));
        return up ? less : -less;
      };
      const rows = [...table.tBodies[0].rows].sort(order);
      table.tBodies[0].append(...rows);
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        sort();
      }
    });
  });
}
