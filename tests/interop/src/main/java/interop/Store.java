package interop;

import co.cask.cdap.common.conf.CConfiguration;
import co.cask.cdap.messaging.TopicMetadata;
import co.cask.cdap.messaging.store.TableFactory;
import co.cask.cdap.messaging.store.hbase.HBaseStore;
import co.cask.cdap.messaging.store.leveldb.LevelDbStore;
import java.io.Closeable;
import java.io.IOException;
import java.util.List;

/** The three tables of a messaging system, opened by CDAP's own factory. */
public interface Store extends TableFactory, Closeable {
  /** Every topic that this store's metadata table tells of: LevelDB's deleted ones (negative generation) too. */
  List<TopicMetadata> topics() throws IOException;

  /** On HBase if the place is {@code hbase:ZOOKEEPER_PORT:PREFIX}, else in a folder. */
  static Store open(CConfiguration conf, String place) throws IOException {
    String[] parts = place.split(":");
    return parts[0].equals("hbase")
        ? new HBaseStore(conf, Integer.parseInt(parts[1]), parts[2]) : new LevelDbStore(conf);
  }
}
