// The sidebar shows the entry of the current page.
document.addEventListener("DOMContentLoaded", () => {
  const entry = document.querySelector(".sidebar-tree .current-page > .reference");
  const sidebar = document.querySelector(".sidebar-scroll");
  if (entry && sidebar) {
    const below = entry.getBoundingClientRect().top - sidebar.getBoundingClientRect().top;
    sidebar.scrollTop += below - sidebar.clientHeight / 2;
  }
});

// On a telephone, long names in tables break between their words only: mpi_neighbor_|allgather(|x), Continuous|Callback. So do
// signatures, before the first parameter.
document.addEventListener("DOMContentLoaded", () => {
  const ends = /(?<=[._(=/])(?=[\w"])|(?<=[a-z])(?=[A-Z])/;
  for (const name of document.querySelectorAll("table.docutils code .pre")) {
    const isWide = name.closest("table").querySelector("th:nth-child(5)");
    const words = name.textContent.length > (isWide ? 8 : 14) ? name.textContent.split(ends) : [];
    if (words.length) name.replaceChildren(...words.flatMap((word) => [word, document.createElement("wbr")]).slice(0, -1));
  }
  // Tables that are still wider than the screen are set in the size of those with five columns.
  for (const around of document.querySelectorAll(".table-wrapper")) {
    if (around.scrollWidth > around.clientWidth) around.firstElementChild.classList.add("wide");
  }
  // Short code, such as x - y, stays on one line, and so do words in the text with hyphens, such as --signal=TERM@120.
  for (const code of document.querySelectorAll("article :is(p, li, td) > code")) {
    if (code.textContent.length < 10) code.style.whiteSpace = "nowrap";
  }
  for (const word of document.querySelectorAll("article :is(p, li) > code .pre")) {
    if (word.textContent.includes("-") && word.textContent.length < 25) word.style.whiteSpace = "nowrap";
  }
  for (const signature of document.querySelectorAll(".sig-object")) {
    signature.querySelector(".sig-paren")?.after(document.createElement("wbr"));
  }
});
