// Show everything, once all other scripts are there.

showLimits();
showMesh();
const timelineView = new TimelineView();
showTables();
showMemory();
showTransfers();
showPasses();
document.documentElement.dataset.ready = "true";
