// The sidebar shows the entry of the current page.
document.addEventListener("DOMContentLoaded", () => {
  const entry = document.querySelector(".sidebar-tree .current-page > .reference");
  const sidebar = document.querySelector(".sidebar-scroll");
  if (entry && sidebar) {
    const below = entry.getBoundingClientRect().top - sidebar.getBoundingClientRect().top;
    sidebar.scrollTop += below - sidebar.clientHeight / 2;
  }
});
